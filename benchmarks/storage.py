"""How fast storage formats are: each preset, float32 and peers, as milliseconds and as a part of copy bandwidth.

    python benchmarks/storage.py            on a GPU: the llama set, 940.6M parameters
    python benchmarks/storage.py --cpu      one matrix of 33.5M parameters

Everything runs in one process, each contestant with tensors of its own, which are freed before the next one. bfloat16
weights have bfloat16 gradients, float32 weights float32 gradients. `bytes` are what a step has to move for each
parameter, with every array read and written once in each visit of the rule.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from fusedadam import AdamP, AdamW, BertAdam, EmaAdamW
from fusedadam.cli.harness.shapes import llama, parameters

BF16, F32 = torch.bfloat16, torch.float32
TURNS = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    device = "cpu" if parser.parse_args().cpu else "cuda"
    shapes = [(8192, 4096)] if device == "cpu" else llama()
    copied = copy_bandwidth(device)
    print(f"| {parameters(shapes) / 1e6:.1f}M parameters | ms | of copy | bytes |\n|---|---|---|---|")
    for name, (make, dtype, moved) in contestants(device).items():
        ms = step_time(make, dtype, shapes, device)
        print(f"| {name} | {ms:.3f} | {moved * parameters(shapes) / (ms * copied):.1%} | {moved} |", flush=True)


def contestants(device: str) -> dict[str, tuple[Callable[[Any], Any], torch.dtype, float]]:
    found: dict[str, tuple[Callable[[Any], Any], torch.dtype, float]] = {
        "AdamW 8bit": (lambda p: AdamW(p, storage="8bit"), BF16, 12.125),
        "AdamW 16bit": (lambda p: AdamW(p, storage="16bit"), BF16, 18),
        "AdamW exact": (lambda p: AdamW(p, storage="exact"), BF16, 26),
        "AdamW float32": (AdamW, F32, 28),
        "torch fused float32": (lambda p: torch.optim.AdamW(p, fused=True), F32, 28),
    }
    if device == "cpu":
        return found
    if importlib.util.find_spec("flashoptim"):
        from flashoptim import FlashAdamW

        found["flashoptim"] = (FlashAdamW, BF16, 12.125)
    for cls, narrow, wide in ((AdamP, 19.1875, 40), (BertAdam, 14.125, 32), (EmaAdamW, 18.125, 36)):
        found[f"{cls.__name__} 8bit"] = (lambda p, c=cls: c(p, storage="8bit"), BF16, narrow)
        found[f"{cls.__name__} float32"] = (cls, F32, wide)
    return found


def step_time(make: Callable[[Any], Any], dtype: torch.dtype, shapes: list[Any], device: str) -> float:
    params = [torch.nn.Parameter(torch.randn(s, device=device).mul_(0.02).to(dtype)) for s in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, device=device).mul_(0.01).to(dtype)
    optimizer = make(params)
    return median_ms(optimizer.step, device)


def copy_bandwidth(device: str) -> float:
    """Bytes read and written in a millisecond, by a plain copy."""
    source = torch.empty((1 if device == "cpu" else 8) << 25, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source), device)


def median_ms(action: Callable[[], Any], device: str) -> float:
    for _ in range(3):
        action()
    if device == "cpu":
        taken = []
        for _ in range(TURNS):
            begin = time.perf_counter()
            action()
            taken.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(taken)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(TURNS + 1)]
    for k, event in enumerate(events):
        if k:
            action()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


if __name__ == "__main__":
    main()
