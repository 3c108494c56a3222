"""What training.py trains: a byte-level language model, on the Python sources that every machine with torch has.

Everything is made once for a process. A run writes its initial weights into the same model, so that the CUDA graph of
forward and backward, which holds addresses, serves all runs.
"""

from __future__ import annotations

import math
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

LR, LAST_LR, TUNING_LR = 1e-3, 1e-4, 1e-5
VALIDATION_BATCH = 64
# flash attention can be made deterministic, which not every kernel can; the CPU may have only the last
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


class Size(NamedTuple):
    """Of a model and its training. Every matrix has rows of a multiple of 32, and at least 4,096 elements."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    warmup: int
    text: int  # bytes in all
    validation: int  # tokens


FULL = Size(8, 512, 8, context=512, batch=16, steps=1500, warmup=100, text=32_000_000, validation=2**20)
MIDDLE = Size(4, 128, 4, context=128, batch=16, steps=1000, warmup=50, text=16_000_000, validation=2**17)
SMALL = Size(2, 64, 2, context=64, batch=8, steps=60, warmup=10, text=1_000_000, validation=2**14)
SIZES = {"full": FULL, "middle": MIDDLE, "small": SMALL}


def sources() -> Iterator[Path]:
    """The standard library, then torch: some systems install the former without its tests, which leaves 10 MB."""
    for root in (Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent):
        yield from sorted(path for path in root.rglob("*.py") if "site-packages" not in path.relative_to(root).parts)


def read_text(size: int) -> dict[str, bytes]:
    """Text for training, for fine-tuning and for validation, by whole files: 7, 2 and 1 of every 10."""
    parts: dict[str, list[bytes]] = {"training": [], "tuning": [], "validation": []}
    kinds = ["validation", "tuning", "tuning"] + 7 * ["training"]
    for number, path in enumerate(sources()):
        content = path.read_bytes()
        parts[kinds[number % 10]].append(content)
        size -= len(content)
        if size <= 0:
            break
    return {kind: b"\n".join(files) for kind, files in parts.items()}


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, width = size.heads, size.width
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_mlp(x))))


class Model(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.width, bias=False), nn.Linear(size.width, 256, bias=False)

    def forward(self, window: Tensor) -> Tensor:
        """The loss of predicting each byte of (batch, context + 1) from those before it, in nats."""
        x = self.blocks(self.embedding(window[:, :-1]) + self.positions.weight)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        generator = torch.Generator(self.head.weight.device).manual_seed(seed)
        for name, param in self.named_parameters():
            if param.dim() < 2:
                param.fill_(1.0)
                continue
            ends_branch = name.endswith(("out.weight", "down.weight"))
            param.normal_(std=0.02 / math.sqrt(2 * len(self.blocks) if ends_branch else 1), generator=generator)


class Training:
    """The model, its text on the device, and the loop of steps. The seed of a run decides weights and batches."""

    def __init__(self, size: Size, device: str) -> None:
        self.size, self.device = size, device
        text = read_text(size.text)
        self.ranges, begin = {}, 0
        for kind, part in text.items():
            self.ranges[kind] = (begin, begin + len(part))
            begin += len(part)
        everything = np.frombuffer(b"".join(text.values()), dtype=np.uint8).copy()
        self.text = torch.from_numpy(everything).to(device)
        self.window = torch.arange(size.context + 1, device=device)
        self.starts = torch.zeros(size.batch, dtype=torch.int64, device=device)
        self.model = Model(size).to(device, torch.bfloat16)
        self.forward_backward = self._capture() if device == "cuda" else self._forward_backward

    def _loss(self, starts: Tensor) -> Tensor:
        with sdpa_kernel(ATTENTION):
            loss: Tensor = self.model(self.text[starts[:, None] + self.window].long())
        return loss

    def _forward_backward(self) -> None:
        self.model.zero_grad()
        self._loss(self.starts).backward()

    def _capture(self) -> Callable[[], None]:
        """Kernels are chosen while capturing. Deterministic ones let anyone repeat a run, bit for bit."""
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # it only takes time
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries allocate what they need before the capture
            for _ in range(3):
                self._forward_backward()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self.model.zero_grad()  # so that the graph has gradients of its own, which it writes in every replay
        with torch.cuda.graph(graph):
            self._forward_backward()
        torch.use_deterministic_algorithms(False)
        return graph.replay

    def batches(self, kind: str, steps: int, seed: int) -> Tensor:
        begin, end = self.ranges[kind]
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(begin, end - self.size.context, (steps, self.size.batch), generator=generator)

    def train(self, optimizer: torch.optim.Optimizer, batches: Tensor, rate: Callable[[int], float]) -> float:
        """Milliseconds per step."""
        batches = batches.to(self.device)
        self._wait()
        began = time.perf_counter()
        for step, starts in enumerate(batches):
            self.starts.copy_(starts)
            self.forward_backward()
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            optimizer.step()
        self._wait()
        return 1e3 * (time.perf_counter() - began) / len(batches)

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss over windows that are spread evenly over the text for validation."""
        begin, end = self.ranges["validation"]
        count = self.size.validation // self.size.context
        starts = torch.linspace(begin, end - self.size.context - 1, count, dtype=torch.float64).long().to(self.device)
        return float(torch.stack([self._loss(some) for some in starts.split(VALIDATION_BATCH)]).double().mean())

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def warmup_and_cosine(step: int, steps: int, warmup: int) -> float:
    cosine = 0.5 + 0.5 * math.cos(math.pi * step / steps)
    return min(1.0, (step + 1) / warmup) * (LAST_LR + (LR - LAST_LR) * cosine)


def float32_weights(model: Model, optimizer: Any) -> dict[str, Tensor]:
    """With the low bits, where the optimizer keeps them."""
    for method in ("float32_state_dict", "get_fp32_model_state_dict"):  # ours and flashoptim's
        if hasattr(optimizer, method):
            weights: dict[str, Tensor] = getattr(optimizer, method)(model)
            return weights
    return {name: weight.float() for name, weight in model.state_dict().items()}


def bytes_per_parameter(model: Model, optimizer: torch.optim.Optimizer) -> float:
    """Of weights and states, whether these are tensors or, as flashoptim's, objects that hold tensors."""
    params = list(model.parameters())
    kept: list[Any] = [*params]
    for value in (value for state in optimizer.state.values() for value in state.values()):
        kept += [value] if isinstance(value, Tensor) else getattr(value, "__dict__", {}).values()
    return sum(one.nbytes for one in kept if isinstance(one, Tensor)) / sum(param.numel() for param in params)
