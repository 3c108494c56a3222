"""The demo as one PNG: losses that agree, the memory of 8 bits, and the time of a step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fusedadam.cli import charts, contestants
from fusedadam.cli.bench.report import number
from fusedadam.cli.demo.speed import Speed
from fusedadam.cli.demo.training import SMOOTHING, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BROAD: dict[str, Any] = {"linewidth": 4, "alpha": 0.45, "color": charts.OURS}
THIN: dict[str, Any] = {"linewidth": 1.1, "linestyle": (0, (3, 2)), "color": charts.INK}
HATCHED: dict[str, Any] = {"hatch": "///", "edgecolor": charts.PAPER, "linewidth": 0}
DISTURBED = "\n(hatched: other programs disturbed most turns; these are the fastest)"
Pairs = Sequence[tuple[Result, Result]]  # ours and its peer
Twins = tuple[Result, Result]  # in float32, and with ``storage=``


def png(pairs: Pairs, speeds: Sequence[Speed], twins: Twins, pass_ms: float | None, title: str) -> bytes:
    made = charts.empty(16, 9.5, f"{title}\n")
    rows = made.add_gridspec(2, 1)
    above = rows[0].subgridspec(1, len(pairs))
    first = made.add_subplot(above[0])
    for k, pair in enumerate(pairs):
        _losses(made.add_subplot(above[k], sharey=first) if k else first, *pair)
    below = rows[1].subgridspec(1, 2)
    memory, times = (made.add_subplot(below[k]) for k in (0, 1))
    _memory(memory, twins)
    _times(times, [*pairs, twins[::-1]], speeds, pass_ms)
    for axes in (first, memory):
        axes.set_ylabel("training loss, smoothed (nats per byte)")
    return charts.png(made)


def smoothed(losses: Sequence[float]) -> list[float]:
    """Means over the last few steps: losses of small batches vary more than the optimizers do."""
    width = 1 + len(losses) // SMOOTHING
    return [statistics.fmean(losses[max(0, k + 1 - width) : k + 1]) for k in range(len(losses))]


def _losses(axes: Axes, ours: Result, theirs: Result) -> None:
    """A panel for each optimizer: most train nearly alike, and would hide each other in one."""
    by, optimizer = theirs.name.split()
    labels = f"fusedadam, {ours.loss:.4f}", f"{by}, {theirs.loss:.4f}"
    _curves(axes, (ours, theirs), labels, optimizer, title="validation loss", title_fontsize=8, alignment="left")


def _memory(axes: Axes, twins: Twins) -> None:
    dtyped = zip(twins, ("float32", "bfloat16"), strict=True)
    labels = [f"{own.name}, {dtype}: {own.bytes_a_parameter:.2f} bytes a parameter" for own, dtype in dtyped]
    _curves(axes, twins, labels, 'Memory of weights and states: storage="8bit" beside float32')


def _curves(axes: Axes, results: Sequence[Result], labels: Sequence[str], heading: str, **legend: Any) -> None:
    for result, label, style in zip(results, labels, (BROAD, THIN), strict=True):
        axes.plot(range(1, len(result.losses) + 1), smoothed(result.losses), label=label, **style)
    axes.set_xlabel("step")
    charts.titled(axes, heading)
    axes.legend(fontsize=8, frameon=False, **legend)
    axes.grid(True, linewidth=0.5, alpha=0.5)


def _times(axes: Axes, pairs: Pairs, speeds: Sequence[Speed], pass_ms: float | None) -> None:
    """Of ours with its peer's, the last one of storage="8bit" with float32's."""
    percents = [100 * speed.ours_ms / speed.peer_ms for speed in speeds]
    widest = max(100.0, *percents)
    for k, ((_, theirs), speed, percent) in enumerate(zip(pairs, speeds, percents, strict=True)):
        style = HATCHED if speed.ratio is None else {}
        axes.barh(k - 0.2, 100, height=0.36, color=charts.PEER, **style)
        axes.barh(k + 0.2, percent, height=0.36, color=charts.OURS, **style)
        charts.label(axes, 100 + widest * 0.015, k - 0.2, f"{theirs.name}: {number(speed.peer_ms)} ms")
        saved = speed.saved_percent(pass_ms) if k < len(pairs) - 1 else None
        of_training = "" if saved is None else f", saves {saved:.1f} % of the training time"
        charts.label(axes, percent + widest * 0.015, k + 0.2, f"{number(speed.ours_ms)} ms{of_training}")
    labels = [ours.name.removeprefix(contestants.OURS).lstrip("- ") for ours, _ in pairs]
    axes.set_yticks(range(len(pairs)), labels)
    axes.set_ylim(len(pairs) - 0.4, -0.6)
    axes.set_xlim(0, 1.8 * widest)
    axes.set_xlabel("time of an optimizer step, % of the peer's (grey)")
    disturbed = any(speed.ratio is None for speed in speeds)
    charts.titled(axes, "Time: a step of the optimizer, alone" + DISTURBED * disturbed)
    axes.tick_params(axis="y", length=0)
