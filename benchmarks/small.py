"""How long the host takes for a step of a small model: ours beside torch's fused AdamW, for 1 to 1,000 tensors.

    python benchmarks/small.py                      on a GPU, with the device idle before each step
    python benchmarks/small.py --cpu                on the CPU, with 2 threads (--threads)
    python benchmarks/small.py --picture FILE       also draws time against the number of tensors, as PNG

All contestants live in one process and take turns. A turn begins with a step that does not count, which refills the
caches that the others have used. Six tensors are those of an MLP; all other sets have 1,024 elements a tensor. The last
rows are steps of the demo's transformer, each after its own forward and backward pass, which leave the caches cold.
Goals are for an H200 and for a CPU of 2 cores; medians decide.
"""

from __future__ import annotations

import argparse
import copy
import gc
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import cases
import torch
from peers import Make, capturable, scaled, scheduled, torch_fused, with_tensor_lr

from fusedadam import AdamP, AdamW, BertAdam, EmaAdamW
from fusedadam.cli import charts
from fusedadam.cli.demo.plan import ON_CPU, ON_GPU
from fusedadam.cli.demo.transformer import ASCII, TinyTransformer
from fusedadam.cli.frame import device_name
from fusedadam.cli.harness.timing import Step, parameters_with_gradients, waiting_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COUNTS, MLP = (1, 4, 16, 64, 100, 256, 1000), 6
LARGEST_QUICK = 16  # tensors
SECONDS = 2.5  # for each number of tensors; the real loop takes twice as long
FIRST_STEPS = 8  # untimed: kernels are compiled, and become one CUDA graph
CALLS = 4  # timed ones of a turn
LEAST_TURNS = 3
LOOP, LOOP_WITH_DEVICE = "AdamW in a real loop", "AdamW in a real loop, until the device is done"
TORCH = "torch fused"


class Pair(NamedTuple):
    """One of ours, and the peer that it is compared with."""

    what: str
    ours: Make
    peer: str
    make_peer: Make


class Times(NamedTuple):
    """Microseconds of each step."""

    ours: Sequence[float]
    peer: Sequence[float]

    def ratio(self, of: Callable[[Sequence[float]], float]) -> float:
        return of(self.peer) / of(self.ours)


class Row(NamedTuple):
    tensors: int
    what: str
    peer: str
    times: Times


class Goal(NamedTuple):
    what: str
    least: float  # times as fast as the peer
    tensors: int | None = None  # None: as many as there are


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--threads", type=int, default=2, help="on the CPU (default: 2)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="a PNG")
    parser.add_argument("--quick", action="store_true", help="few tensors and turns: to try it, not to publish")
    chosen = parser.parse_args(arguments)
    device = "cpu" if chosen.cpu else "cuda"
    if chosen.cpu:
        torch.set_num_threads(chosen.threads)
    where = device_name(torch.device(device)) + (f", {chosen.threads} threads" if chosen.cpu else "")
    where = f"{where}; torch {torch.__version__}, Python {platform.python_version()}"
    print(f"{where}\n\n{header()}", flush=True)
    rows = []
    for row in measure(device, 0.0 if chosen.quick else SECONDS, LARGEST_QUICK if chosen.quick else COUNTS[-1]):
        rows.append(row)
        print(line(row), flush=True)
    print("\n" + "\n".join(verdicts(rows, goals(device))))
    if chosen.picture and not charts.possible():
        print(charts.MISSING)
    elif chosen.picture:
        chosen.picture.write_bytes(picture(rows, f"Host time of one optimizer.step(): {where}"))
    return 0


def pairs(device: str) -> list[Pair]:
    """``capturable`` is for CUDA graphs: on a CPU torch refuses it."""
    ways = {", GradScaler": scaled, ", tensor lr": with_tensor_lr, ", scheduled lr": scheduled}
    ways = ways if device == "cpu" else {", capturable": capturable, **ways}
    same = [Pair(f"AdamW{how}", way(AdamW), f"{TORCH}{how}", way(torch_fused)) for how, way in ways.items()]
    same.insert(0, Pair("AdamW", AdamW, TORCH, torch_fused))
    more = {
        "AdamW, max_grad_norm=1": partial(AdamW, max_grad_norm=1.0),
        "AdamP": AdamP,
        "BertAdam": partial(BertAdam, lr=1e-3),
        "EmaAdamW": EmaAdamW,
    }
    return [*same, *(Pair(what, make, TORCH, torch_fused) for what, make in more.items())]


def goals(device: str) -> list[Goal]:
    """Of a step of AdamW, ``GradScaler`` and so on, against torch's fused AdamW with the same, by number of tensors."""
    loop = Goal(LOOP, 1.0)
    if device == "cpu":
        return [*(Goal("AdamW", least, n) for n, least in {1: 1.1, 4: 1.2, 16: 1.8, 1000: 6.0}.items()), loop]
    on_device = ("AdamW, capturable", "AdamW, GradScaler", "AdamW, tensor lr")
    return [
        *(Goal("AdamW", least, n) for n, least in {MLP: 1.5, 100: 2.5, 1000: 8.0}.items()),
        *(Goal(what, 1.0, MLP) for what in ("AdamW, max_grad_norm=1", "AdamP", "BertAdam", "EmaAdamW")),
        *(Goal(what, least, n) for what in on_device for n, least in {MLP: 1.2, 1000: 5.0}.items()),
        loop,
        Goal(LOOP_WITH_DEVICE, 1.0),
    ]


def measure(device: str, seconds: float, largest: int) -> Iterator[Row]:
    for count in sorted({*COUNTS, MLP}):
        if count <= largest:
            shapes = cases.mlp() if count == MLP else cases.alike(count)
            contestants = pairs(device)
            makes = {pair.what: pair.ours for pair in contestants}
            makes |= {pair.peer: pair.make_peer for pair in contestants}
            optimizers = [make(parameters_with_gradients(shapes, device, torch.float32)) for make in makes.values()]
            steps: dict[str, Step] = {name: made.step for name, made in zip(makes, optimizers, strict=True)}
            taken, _ = take_turns(steps, device, seconds)
            yield from (Row(count, p.what, p.peer, Times(taken[p.what], taken[p.peer])) for p in contestants)
    yield from real_loop(device, 2 * seconds)


def take_turns(
    steps: Mapping[str, Step], device: str, seconds: float, before: Mapping[str, Step] | None = None
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Microseconds of each timed call until it returns, and until the device is done with it.

    ``before``: what precedes each call, and is not timed. Each round has another order: it matters who has just used
    the caches.
    """
    wait = waiting_for(device)

    def call(name: str) -> tuple[float, float]:
        if before is not None:
            before[name]()
        wait()
        begin = time.perf_counter()
        steps[name]()
        returned = time.perf_counter()
        wait()
        return 1e6 * (returned - begin), 1e6 * (time.perf_counter() - begin)

    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for name in FIRST_STEPS * list(steps):
        call(name)
    gc.collect()  # of what contestants of other rows have left
    end, orders, turns = time.perf_counter() + seconds, random.Random(0), 0
    while turns < LEAST_TURNS or time.perf_counter() < end:
        for name in orders.sample(list(steps), len(steps)):
            call(name)
            taken[name] += [call(name) for _ in range(CALLS)]
        turns += 1
    host, whole = ({name: [call[k] for call in calls] for name, calls in taken.items()} for k in (0, 1))
    return host, whole


def real_loop(device: str, seconds: float) -> Iterator[Row]:
    """A step of the demo's model after forward and backward, which free the gradients and make them anew."""
    size = ON_CPU if device == "cpu" else ON_GPU
    torch.manual_seed(0)
    model = TinyTransformer(size)
    windows = torch.randint(ASCII, (size.batch, size.context + 1)).to(device)
    models = {what: copy.deepcopy(model).to(device) for what in (LOOP, TORCH)}
    makes: dict[str, Make] = {LOOP: AdamW, TORCH: torch_fused}
    steps: dict[str, Step] = {what: make(models[what].parameters()).step for what, make in makes.items()}

    def passes(own: TinyTransformer) -> None:
        own.zero_grad(set_to_none=True)
        own.loss(windows).backward()

    before = {what: partial(passes, own) for what, own in models.items()}
    host, whole = take_turns(steps, device, seconds, before)
    count = sum(1 for _ in model.parameters())
    yield Row(count, LOOP, TORCH, Times(host[LOOP], host[TORCH]))
    if device != "cpu":
        yield Row(count, LOOP_WITH_DEVICE, TORCH, Times(whole[LOOP], whole[TORCH]))


def header() -> str:
    columns = ("tensors", "", "µs, min / median", "beside", "µs, min / median", "times as fast")
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def line(row: Row) -> str:
    def shown(times: Sequence[float]) -> str:
        return f"{min(times):,.1f} / {statistics.median(times):,.1f}"

    ratios = f"{row.times.ratio(min):.2f} / {row.times.ratio(statistics.median):.2f}"
    cells = (f"{row.tensors:,}", row.what, shown(row.times.ours), row.peer, shown(row.times.peer), ratios)
    return f"| {' | '.join(cells)} |"


def verdicts(rows: Sequence[Row], wanted: Sequence[Goal]) -> Iterator[str]:
    for goal in wanted:
        found = [row for row in rows if row.what == goal.what and goal.tensors in (None, row.tensors)]
        name = goal.what + ("" if goal.tensors is None else f", {goal.tensors:,} tensor{'s' * (goal.tensors > 1)}")
        if not found:
            yield f"not measured: {name}: at least {goal.least:g} times as fast as its peer"
        for row in found:
            ratio, fastest = row.times.ratio(statistics.median), row.times.ratio(min)
            verdict = "met" if ratio >= goal.least else "MISSED"
            yield (
                f"{verdict}: {name}: {ratio:.2f} times as fast as {row.peer} (minima: {fastest:.2f}); "
                f"at least {goal.least:g}"
            )


def picture(rows: Sequence[Row], title: str) -> bytes:
    """Medians against the number of tensors: left, what torch has, too; right, what is compared with torch's AdamW."""
    drawn = [row for row in rows if row.what not in (LOOP, LOOP_WITH_DEVICE) and row.tensors != MLP]
    figure = charts.empty(13, 5.2, f"{title}\n")
    left, right = figure.subplots(1, 2, sharey=True)
    same = [row for row in drawn if row.what == "AdamW" or row.peer != TORCH]
    _lines(left, same, "AdamW, and torch fused with the same (dashed)")
    _lines(right, [row for row in drawn if row not in same], "More than AdamW, and torch fused AdamW alone (dashed)")
    left.set_ylabel("microseconds, median")
    return charts.png(figure)


def _lines(axes: Axes, rows: Sequence[Row], title: str) -> None:
    from matplotlib.ticker import LogLocator

    named = dict.fromkeys(row.what for row in rows)
    peers: set[str] = set()
    for what, color in zip(named, (charts.OURS, *charts.SERIES), strict=False):
        own = [row for row in rows if row.what == what]
        counts, peer = [row.tensors for row in own], own[0].peer
        axes.plot(counts, [statistics.median(row.times.ours) for row in own], ".-", color=color, label=what)
        if peer not in peers:
            theirs = [statistics.median(row.times.peer) for row in own]
            shade = color if len({row.peer for row in rows}) > 1 else charts.INK
            axes.plot(counts, theirs, linestyle=charts.DASHED, color=shade, label=peer)
            peers.add(peer)
    axes.set(xscale="log", yscale="log", xlabel="tensors")
    ticks = sorted({row.tensors for row in rows})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.minorticks_off()
    charts.titled(axes, title)
    axes.legend(fontsize=8, frameon=False)
    axes.grid(True, linewidth=0.5, alpha=0.5)


if __name__ == "__main__":
    raise SystemExit(main())
