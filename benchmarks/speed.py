"""How fast is a step? Ours beside its peers, in one run: `python benchmarks/speed.py` (on the GPU if there is one).

Absolute times depend on the machine and on who shares it; the ratios are what to read. Ours and the peer take turns,
and each figure is the median of its turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import torch

import fusedadam
from fusedadam.cli.side_by_side import TorchAdamWWithEma
from fusedadam.optimizer import FusedOptimizer
from fusedadam.rule import Value, Values, rule

Step = Callable[[], object]
TURNS, TURN = 11, 0.1  # how many, and how many seconds each


@rule(scalars=lambda step: {})
def no_mathematics(param: Value, grad: Value, exp_avg: Value, exp_avg_sq: Value) -> Values:
    """Reads and writes what AdamW reads and writes."""
    before = param
    param = exp_avg + grad
    exp_avg = exp_avg_sq
    exp_avg_sq = before
    return param, exp_avg, exp_avg_sq


class NoMathematics(FusedOptimizer):
    rule = no_mathematics

    def __init__(self, params: Any, lr: float = 0, weight_decay: float = 0) -> None:
        super().__init__(params, locals())


def torch_fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True)


def make_step(
    make: Callable[[Any], torch.optim.Optimizer], shapes: list[models.Shape], dtype: torch.dtype, device: str
) -> Step:
    params = [torch.nn.Parameter(torch.randn(s, device=device).to(dtype)) for s in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return make(params).step


def compare(steps: dict[str, Step], device: str) -> dict[str, float]:
    """Milliseconds a call of each, taking turns; a turn is as many calls as take a tenth of a second."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)

    def seconds(step: Step, repeat: int) -> float:
        wait()
        begin = time.perf_counter()
        for _ in range(repeat):
            step()
        wait()
        return (time.perf_counter() - begin) / repeat

    for step in steps.values():  # compile, allocate
        seconds(step, 2)
    repeat = {name: max(2, min(100, round(TURN / seconds(step, 3)))) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(TURNS):
        for name, step in steps.items():
            times[name].append(seconds(step, repeat[name]))
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def copy_step(device: str) -> tuple[Step, int]:
    source = torch.randn(2**28 if device == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.numel() * source.element_size()


class Report:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, what: str, ours: float, peer: str, theirs: float, goal: float, figure: float, unit: str) -> None:
        met = figure >= goal if unit != "s" and not unit.startswith("of the time") else figure <= goal
        self.rows.append(
            {"what": what, "ours": ours, "peer": peer, "theirs": theirs, "figure": figure, "unit": unit, "goal": goal}
            | {"met": met}
        )
        print(f"  {what}: {figure:.3g} {unit} (goal {goal:g}){'' if met else '  MISSED'}", flush=True)

    def faster(self, what: str, times: dict[str, float], peer: str, goal: float) -> None:
        figure = times["peer"] / times["ours"]
        self.add(what, times["ours"], peer, times["peer"], goal, figure, "times as fast")

    def table(self) -> str:
        head = ("what", "ours", "peer", "theirs", "figure", "goal")
        rows = [head] + [
            (
                r["what"],
                f"{r['ours']:.4g}",
                r["peer"],
                f"{r['theirs']:.4g}",
                f"{r['figure']:.3g} {r['unit']}",
                f"{r['goal']:g}",
            )
            for r in self.rows
        ]
        widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        marks = ["", *("" if r["met"] else "MISSED" for r in self.rows)]
        return "\n".join(f"{line}  {mark}" for line, mark in zip(lines, marks, strict=True))


def on_gpu(report: Report) -> None:
    copy, copied = copy_step("cuda")
    ours, ema = fusedadam.AdamW, fusedadam.EmaAdamW

    def of_copy(
        what: str,
        make: Any,
        shapes: list[models.Shape],
        dtype: torch.dtype,
        bytes_each: int,
        goal: float,
        peer: Any = torch_fused,
        faster: float | None = None,
    ) -> None:
        steps = {
            "ours": make_step(make, shapes, dtype, "cuda"),
            "peer": make_step(peer, shapes, dtype, "cuda"),
            "copy": copy,
        }
        t = compare(steps, "cuda")
        moved = bytes_each * sum(torch.Size(s).numel() for s in shapes)
        percent = 100 * moved / t["ours"] / (copied / t["copy"])
        theirs = 100 * moved / t["peer"] / (copied / t["copy"])
        report.add(what, t["ours"], f"{peer.__name__} ({theirs:.0f} % of copy)", t["peer"], goal, percent, "% of copy")
        if faster:
            report.faster(what, t, peer.__name__, faster)
        del steps
        torch.cuda.empty_cache()

    fp32, bf16 = torch.float32, torch.bfloat16
    of_copy("AdamW fp32, one tensor of 268M", ours, models.one(256), fp32, 28, 95)
    of_copy("AdamW fp32, llama", ours, models.llama(), fp32, 28, 96)
    of_copy("AdamW bf16, llama", ours, models.llama(), bf16, 14, 90)
    of_copy("AdamW fp32, gpt", ours, models.gpt(), fp32, 28, 92, faster=1.13)
    of_copy("EmaAdamW fp32, llama", ema, models.llama(), fp32, 36, 94, TorchAdamWWithEma)
    small = models.many_small(65536)
    t = compare(
        {"ours": make_step(ours, small, fp32, "cuda"), "peer": make_step(torch_fused, small, fp32, "cuda")}, "cuda"
    )
    report.faster("AdamW fp32, 1,000 small tensors", t, "torch_fused", 5)


def on_cpu(report: Report) -> None:
    ours, ema = fusedadam.AdamW, fusedadam.EmaAdamW
    big, small = models.one(32), models.many_small(4096)
    for name, dtype, goal in (
        ("fp32", torch.float32, 0.97),
        ("bf16", torch.bfloat16, 1.3),
        ("fp16", torch.float16, 1.1),
    ):
        steps = {"ours": make_step(ours, big, dtype, "cpu"), "peer": make_step(torch_fused, big, dtype, "cpu")}
        if dtype == torch.float32:
            steps["bytes"] = make_step(NoMathematics, big, dtype, "cpu")
        t = compare(steps, "cpu")
        report.faster(f"AdamW {name}, 33.5M", t, "torch_fused", goal)
        if "bytes" in t:
            report.add(
                "AdamW fp32, 33.5M",
                t["ours"],
                "the same bytes, no mathematics",
                t["bytes"],
                1.1,
                t["ours"] / t["bytes"],
                "of the time",
            )
    t = compare(
        {
            "ours": make_step(ema, big, torch.float32, "cpu"),
            "peer": make_step(TorchAdamWWithEma, big, torch.float32, "cpu"),
        },
        "cpu",
    )
    report.faster("EmaAdamW fp32, 33.5M", t, "TorchAdamWWithEma", 1.3)
    t = compare(
        {
            "ours": make_step(ours, small, torch.float32, "cpu"),
            "peer": make_step(torch_fused, small, torch.float32, "cpu"),
        },
        "cpu",
    )
    report.faster("AdamW fp32, 1,000 small tensors", t, "torch_fused", 4)


FIRST_STEP = """
import time, torch
begin = time.perf_counter()
import fusedadam
imported = time.perf_counter() - begin
param = torch.nn.Parameter(torch.randn(1000))
param.grad = torch.randn(1000)
optimizer = fusedadam.AdamW([param])
begin = time.perf_counter()
optimizer.step()
print(imported, time.perf_counter() - begin)
"""


def at_start(report: Report) -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "FUSEDADAM_CACHE_DIR": folder}

        def start() -> list[float]:
            out = subprocess.run(
                [sys.executable, "-c", FIRST_STEP], env=environment, capture_output=True, text=True, check=True
            )
            return [float(x) for x in out.stdout.split()]

        fresh = start()[1]
        imported, cached = (statistics.median(values) for values in zip(*(start() for _ in range(5)), strict=True))
    report.add("import fusedadam, beyond torch", imported, "", 0, 0.1, imported, "s")
    report.add("first step, compiled code cached", cached, "", 0, 0.7, cached, "s")
    report.add("first step, nothing cached", fresh, "", 0, 5, fresh, "s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    name = (
        torch.cuda.get_device_name()
        if arguments.device == "cuda"
        else f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    )
    print(f"{name}; torch {torch.__version__}, Python {platform.python_version()}")
    report = Report()
    if arguments.device == "cuda":
        on_gpu(report)
    else:
        at_start(report)
        on_cpu(report)
    print(f"\nmilliseconds (seconds for imports and first steps), medians, {name}\n{report.table()}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report.rows, indent=2))


if __name__ == "__main__":
    main()
