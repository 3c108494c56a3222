"""How long does a step of Muon take beside torch.optim.Muon? `python benchmarks/muon.py` needs a GPU, prints a table
and writes docs/pictures/muon.json; with `--device cpu` it prints alone. `python benchmarks/muon.py draw` draws
docs/pictures/muon.svg from the file.

Whole steps, with momentum, products and update: of square matrices of many widths, alone and 12 at once, and of the
matrices of GPT-2 small and of four layers of a 7B Llama. Both take turns; medians count. Memory is what is allocated
after a step and at its peak, without parameters and gradients.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fusedadam import Muon
from fusedadam.cli import charts
from fusedadam.cli.harness.shapes import Shape, gpt, llama
from fusedadam.cli.harness.timing import waiting_for

RESULTS = Path(__file__).parents[1] / "docs/pictures/muon.json"
PICTURE = RESULTS.with_suffix(".svg")
WIDTHS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
COUNTS = (1, 12)
WARM, TURNS, LONGEST = 4, 5, 0.03  # steps before timing, turns, and seconds of a turn
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def matrices(shapes: Sequence[Shape]) -> list[Shape]:
    """The hidden ones: the first matrices of these sets are embeddings."""
    found = [shape for shape in shapes if len(shape) == 2]
    return [shape for shape in found if max(shape) < 30_000 and shape != (1024, 768)]


def contestant(module: Any, shapes: Sequence[Shape], dtype: torch.dtype, device: str) -> torch.optim.Optimizer:
    generator = torch.Generator(device).manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, device=device, generator=generator).to(dtype)) for s in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, device=device, generator=generator).to(dtype)
    return module(params, lr=1e-3)


def extra(optimizer: torch.optim.Optimizer, device: str) -> dict[str, float]:
    """MiB beside parameters, gradients and momentum: kept after a step, and at its peak."""
    if device == "cpu":
        return {}
    gc.collect()  # contestants before it
    params = [param for group in optimizer.param_groups for param in group["params"]]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    momentum = sum(param.numel() * param.element_size() for param in params)
    after, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    return {"kept": round((after - before - momentum) / 2**20, 1), "peak": round((peak - before - momentum) / 2**20, 1)}


def measured(what: str, shapes: Sequence[Shape], dtype: str, device: str, turns: int) -> dict[str, Any]:
    wait, times = waiting_for(device), dict[str, list[float]]()
    steps, memory = {}, {}
    for name, module in (("ours", Muon), ("torch", torch.optim.Muon)):
        optimizer = contestant(module, shapes, DTYPES[dtype], device)
        memory[name] = extra(optimizer, device)
        steps[name] = optimizer.step
    calls = {}
    for name, step in steps.items():
        for _ in range(WARM):
            step()
        wait()
        begin = time.perf_counter()
        step()
        wait()
        calls[name] = max(1, min(50, round(LONGEST / (time.perf_counter() - begin))))
    for _ in range(turns):
        for name, step in steps.items():
            begin = time.perf_counter()
            for _ in range(calls[name]):
                step()
            wait()
            times.setdefault(name, []).append(1e3 * (time.perf_counter() - begin) / calls[name])
    ms = {name: round(statistics.median(found), 4) for name, found in times.items()}
    return {"what": what, "dtype": dtype, **ms, "ratio": round(ms["torch"] / ms["ours"], 2), "memory": memory}


def drawn(rows: Sequence[dict[str, Any]], device: str) -> None:
    figure = charts.empty(7.5, 3.6, "")
    for axes, count in zip(figure.subplots(1, len(COUNTS), sharey=True), COUNTS, strict=True):
        alike = [row for row in rows if row["what"].startswith(f"{count} of ") and row["dtype"] == "fp32"]
        widths = [int(row["what"].rpartition(" ")[2]) for row in alike]
        charts.titled(axes, f"{'One matrix' if count == 1 else f'{count} matrices'}: ms of a step, {device}")
        for name, label, color in (
            ("ours", "fusedadam.Muon", charts.OURS),
            ("torch", "torch.optim.Muon", charts.PEER),
        ):
            axes.loglog(widths, [row[name] for row in alike], "o-", color=color, label=label, linewidth=2, markersize=4)
        axes.set_xlabel("width of the square matrices")
        axes.set_xticks(widths, [str(width) for width in widths], fontsize=7.5, rotation=45)
        axes.minorticks_off()
    axes.legend(frameon=False)
    figure.savefig(PICTURE)
    print(f"drawn: {PICTURE}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=("run", "draw"), default="run")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--largest", type=int, default=WIDTHS[-1], help="width; the sets are measured with all of them")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    if given.action == "draw":
        found = json.loads(given.results.read_text())
        drawn(found["rows"], found["device"])
        return 0
    sets = {"gpt": matrices(gpt()), "llama": matrices(llama())}
    sets = sets if given.largest == WIDTHS[-1] else {}
    widths = [width for width in WIDTHS if width <= given.largest]
    sets |= {f"{count} of {width}": [(width, width)] * count for count in COUNTS for width in widths}
    rows = []
    for what, shapes in sets.items():
        for dtype in DTYPES if what in ("gpt", "llama") else ("fp32",):
            rows.append(measured(what, shapes, dtype, given.device, given.turns))
            print(json.dumps(rows[-1]), flush=True)
    name = torch.cuda.get_device_name() if given.device == "cuda" else given.device
    if given.device == "cuda" or given.results != RESULTS:  # the picture is of a GPU
        given.results.write_text(
            json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
