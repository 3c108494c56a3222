"""The demo as one PNG: losses that agree, the memory of 8 bits, and the time of a step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fusedadam.cli import charts
from fusedadam.cli.demo.training import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTHING = 12  # windows of this fraction of a training are averaged
Pairs = Sequence[tuple[Result, Result]]  # ours and its peer
Twins = tuple[Result, Result]  # in float32, and with ``storage=``


def png(pairs: Pairs, twins: Twins, title: str, doubt: str | None) -> bytes:
    """``doubt``: why speeds cannot be compared, if they cannot."""
    made = charts.empty(18.5, 5.2, f"{title}\n")
    left, middle, right = made.subplots(1, 3)
    _losses(left, pairs)
    _memory(middle, twins)
    _times(right, pairs, doubt)
    return charts.png(made)


def smoothed(losses: Sequence[float]) -> list[float]:
    """Means over the last few steps: losses of small batches vary more than the optimizers do."""
    width = 1 + len(losses) // SMOOTHING
    return [statistics.fmean(losses[max(0, k + 1 - width) : k + 1]) for k in range(len(losses))]


def _losses(axes: Axes, pairs: Pairs) -> None:
    for (ours, theirs), color in zip(pairs, (charts.OURS, *charts.SERIES), strict=False):
        steps = range(1, len(ours.losses) + 1)
        axes.plot(steps, smoothed(ours.losses), color=color, linewidth=3, alpha=0.45, label=ours.name)
        axes.plot(steps, smoothed(theirs.losses), color=color, linewidth=1.1, linestyle=(0, (3, 2)), label=theirs.name)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, smoothed (nats per byte)")
    charts.titled(axes, "Loss: ours is the broad line, its peer the thin one on top")
    axes.legend(fontsize=8, frameon=False, ncols=2)
    axes.grid(True, linewidth=0.5, alpha=0.5)


def _memory(axes: Axes, twins: Twins) -> None:
    broad: dict[str, Any] = {"linewidth": 3, "alpha": 0.45, "color": charts.OURS}
    thin: dict[str, Any] = {"linewidth": 1.1, "linestyle": (0, (3, 2)), "color": charts.INK}
    for result, model, style in zip(twins, ("float32", "bfloat16"), (broad, thin), strict=True):
        label = f"{result.name}, {model}: {result.bytes_a_parameter:.2f} bytes a parameter"
        axes.plot(range(1, len(result.losses) + 1), smoothed(result.losses), label=label, **style)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, smoothed (nats per byte)")
    charts.titled(axes, 'Memory of weights and states: storage="8bit" beside float32')
    axes.legend(fontsize=8, frameon=False)
    axes.grid(True, linewidth=0.5, alpha=0.5)


def _times(axes: Axes, pairs: Pairs, doubt: str | None) -> None:
    widest = 100.0
    for k, (ours, theirs) in enumerate(pairs):
        percent = 100 * ours.step_ms / theirs.step_ms
        widest = max(widest, percent)
        axes.barh(k - 0.2, 100, height=0.36, color=charts.PEER)
        axes.barh(k + 0.2, percent, height=0.36, color=charts.OURS)
        axes.text(1.5, k - 0.2, f"{theirs.name}: {theirs.step_ms:.3g} ms", va="center", fontsize=8.5, color=charts.INK)
        saved = "" if doubt else f", saves {ours.saved_percent(theirs):.1f} % of the training time"
        charts.label(axes, percent + 1.5, k + 0.2, f"{ours.step_ms:.3g} ms{saved}")
    axes.set_yticks(range(len(pairs)), [ours.name.split()[-1] for ours, _ in pairs])
    axes.set_ylim(len(pairs) - 0.4, -0.6)
    axes.set_xlim(0, widest + 80)
    axes.set_xticks([0, 25, 50, 75, 100])
    axes.set_xlabel("time of an optimizer step, % of the peer's (grey)")
    charts.titled(axes, doubt or "Time: the optimizer's part of a training step")
    axes.tick_params(axis="y", length=0)
