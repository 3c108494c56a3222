"""The demo as one PNG: losses that agree, the memory of 8 bits, and the time of a step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fusedadam.cli import charts
from fusedadam.cli.demo.speed import Speed
from fusedadam.cli.demo.training import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

THIN = (0, (3, 2))
SMOOTHING = 12  # windows of this fraction of a training are averaged
DISTURBED = "disturbed by other programs"
Pairs = Sequence[tuple[Result, Result]]  # ours and its peer
Twins = tuple[Result, Result]  # in float32, and with ``storage=``


def png(pairs: Pairs, speeds: Sequence[Speed], twins: Twins, pass_ms: float | None, title: str) -> bytes:
    made = charts.empty(16, 9.5, f"{title}\n")
    rows = made.add_gridspec(2, 1)
    above = rows[0].subgridspec(1, len(pairs))
    first = None
    for k, pair in enumerate(pairs):
        axes = made.add_subplot(above[k], sharey=first)
        first = first or axes
        _losses(axes, *pair)
    first and first.set_ylabel("training loss, smoothed (nats per byte)")
    below = rows[1].subgridspec(1, 2)
    _memory(made.add_subplot(below[0]), twins)
    _times(made.add_subplot(below[1]), pairs, speeds, pass_ms)
    return charts.png(made)


def smoothed(losses: Sequence[float]) -> list[float]:
    """Means over the last few steps: losses of small batches vary more than the optimizers do."""
    width = 1 + len(losses) // SMOOTHING
    return [statistics.fmean(losses[max(0, k + 1 - width) : k + 1]) for k in range(len(losses))]


def _losses(axes: Axes, ours: Result, theirs: Result) -> None:
    """A panel for each optimizer: most train nearly alike, and would hide each other in one."""
    steps, (by, optimizer) = range(1, len(ours.losses) + 1), theirs.name.split()
    axes.plot(
        steps, smoothed(ours.losses), color=charts.OURS, linewidth=4, alpha=0.45, label=f"fusedadam, {ours.loss:.4f}"
    )
    axes.plot(
        steps,
        smoothed(theirs.losses),
        color=charts.INK,
        linewidth=1.1,
        linestyle=THIN,
        label=f"{by}, {theirs.loss:.4f}",
    )
    axes.set_xlabel("step")
    charts.titled(axes, optimizer)
    axes.legend(fontsize=8, frameon=False, title="validation loss", title_fontsize=8, alignment="left")
    axes.grid(True, linewidth=0.5, alpha=0.5)


def _memory(axes: Axes, twins: Twins) -> None:
    broad: dict[str, Any] = {"linewidth": 3, "alpha": 0.45, "color": charts.OURS}
    thin: dict[str, Any] = {"linewidth": 1.1, "linestyle": THIN, "color": charts.INK}
    for result, model, style in zip(twins, ("float32", "bfloat16"), (broad, thin), strict=True):
        label = f"{result.name}, {model}: {result.bytes_a_parameter:.2f} bytes a parameter"
        axes.plot(range(1, len(result.losses) + 1), smoothed(result.losses), label=label, **style)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, smoothed (nats per byte)")
    charts.titled(axes, 'Memory of weights and states: storage="8bit" beside float32')
    axes.legend(fontsize=8, frameon=False)
    axes.grid(True, linewidth=0.5, alpha=0.5)


def _times(axes: Axes, pairs: Pairs, speeds: Sequence[Speed], pass_ms: float | None) -> None:
    widest = 100.0
    for k, ((_, theirs), speed) in enumerate(zip(pairs, speeds, strict=True)):
        percent = 100 / speed.ratio if speed.ratio else 0.0
        widest = max(widest, percent)
        axes.barh(k - 0.2, 100, height=0.36, color=charts.PEER)
        axes.barh(k + 0.2, percent, height=0.36, color=charts.OURS)
        axes.text(1.5, k - 0.2, f"{theirs.name}: {speed.peer_ms:.3g} ms", va="center", fontsize=8.5, color=charts.INK)
        saved = speed.saved_percent(pass_ms)
        of_training = "" if saved is None else f", saves {saved:.1f} % of the training time"
        said = f"{speed.ours_ms:.3g} ms{of_training}" if speed.ratio else DISTURBED
        charts.label(axes, percent + 1.5, k + 0.2, said)
    axes.set_yticks(range(len(pairs)), [ours.name.split()[-1] for ours, _ in pairs])
    axes.set_ylim(len(pairs) - 0.4, -0.6)
    axes.set_xlim(0, widest + 80)
    axes.set_xticks([0, 25, 50, 75, 100])
    axes.set_xlabel("time of an optimizer step, % of the peer's (grey)")
    charts.titled(axes, "Time: a step of the optimizer, alone")
    axes.tick_params(axis="y", length=0)
