"""A model of 6.7 billion parameters in 24 GB: trained on one GPU, with its states in host memory.

    python benchmarks/one_gpu.py [--layers 32] [--steps 50] [--gigabytes 24]

A llama-shaped model with random weights learns synthetic text: bfloat16, ``storage="8bit"``, ``offload=True``,
``step_in_backward`` and activation checkpointing, with torch limited to that much memory. Then the same with the most
layers that ``torch.optim.AdamW`` fits into it (float32 weights under bfloat16 autocast). The host needs 21 GB to lock.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fusedadam import AdamW, step_in_backward

WIDTH, HIDDEN, HEADS, WORDS = 4096, 11008, 32, 32000
LENGTH, BATCH, LR = 1024, 4, 1e-4
PER_LAYER = 4 * WIDTH**2 + 3 * WIDTH * HIDDEN
TO_SPARE = 3e9  # bytes, of activations and logits


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.between(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words[:, :-1])
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), words[:, 1:].flatten())


def text(step: int) -> Tensor:
    """Each word follows from the one before it."""
    words = [torch.randint(0, 997, (BATCH,), generator=torch.Generator().manual_seed(step))]
    for _ in range(LENGTH):
        words.append((3 * words[-1] + 1) % 997)
    return torch.stack(words, 1).cuda()


def train(ours: bool, layers: int, steps: int) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if ours else torch.float32)
    with torch.device("cuda"):
        model = Model(layers)
    torch.set_default_dtype(torch.float32)
    optimizer: Any
    if ours:
        optimizer = step_in_backward(model, lambda params: AdamW(params, lr=LR, storage="8bit", offload=True))
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    losses, times = [], []
    for step in range(steps):
        words = text(step)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16, enabled=not ours):
            loss = model(words)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    count = sum(p.numel() for p in model.parameters())
    seconds = sorted(times[steps // 2 :])[len(times[steps // 2 :]) // 2]
    host = sum(v.nbytes for state in optimizer.state.values() for n, v in state.items() if v.is_cpu and n != "step")
    name = "AdamW, 8bit, offload, in backward" if ours else "torch.optim.AdamW, float32"
    print(
        f"{name}: {count / 1e9:.2f} billion parameters, {BATCH * LENGTH / seconds:,.0f} tokens a second, "
        f"{1e3 * seconds:.0f} ms a step, {torch.cuda.max_memory_allocated() / 1e9:.1f} GB on the device, "
        f"{host / 1e9:.1f} GB on the host; loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {steps} steps",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--gigabytes", type=float, default=24.0, help="of device memory (default: 24)")
    options = parser.parse_args()
    limit = 1e9 * options.gigabytes
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    train(True, options.layers, options.steps)
    fitting = int(((limit - TO_SPARE) / 16 - 2 * WORDS * WIDTH) / PER_LAYER)
    train(False, max(1, min(fitting, options.layers)), options.steps)


if __name__ == "__main__":
    main()
