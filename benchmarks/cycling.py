"""What a scheduler that changes beta1 in every step (OneCycleLR) costs, in time and in memory that stays.

    python benchmarks/cycling.py [--device cuda] [--steps 10000]

Prints one row for each way to step: host time of a step with betas that stay and with betas that cycle, and the memory
in use after a tenth of the steps and after all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import fusedadam


def steps_of(device: str, way: str, cycling: bool, steps: int) -> tuple[float, int, int]:
    """Median microseconds of a step, and bytes on the device after a tenth and after all of them."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(64, 64, device=device)) for _ in range(6)]
    for param in params:
        param.grad = torch.randn_like(param)
    options = {"capturable": True} if way == "capturable" else {}
    optimizer = fusedadam.AdamW(params, lr=1e-3, **options)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps + 1, cycle_momentum=cycling)
    if way == "scaled":
        optimizer.grad_scale = torch.full((1,), 1024.0, device=device)
        optimizer.found_inf = torch.zeros(1, device=device)
    times, early = [], 0
    for step in range(steps):
        begin = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - begin)
        schedule.step()
        if step == steps // 10:
            early = in_use(device)
        if step % 100 == 0:
            synchronize(device)
    return statistics.median(times[steps // 10 :]) * 1e6, early, in_use(device)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def in_use(device: str) -> int:
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=10_000)
    given = parser.parse_args()
    print(f"AdamW, 6 tensors, {given.steps} steps on {given.device}")
    print(f"{'':12} {'betas stay':>12} {'betas cycle':>12} {'memory early':>14} {'memory at the end':>18}")
    for way in ("plain", "scaled", "capturable") if given.device == "cuda" else ("plain",):
        steps_of(given.device, way, True, 100)  # compiles
        constant, _, _ = steps_of(given.device, way, False, given.steps)
        cycling, early, late = steps_of(given.device, way, True, given.steps)
        print(f"{way:12} {constant:9.0f} us {cycling:9.0f} us {early / 1024:10.0f} KiB {late / 1024:14.0f} KiB")


if __name__ == "__main__":
    main()
