"""What a user's own run would save: time per parameter, measured here, times the number of parameters."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fusedadam.cli import display
from fusedadam.cli.demo.training import OPTIMIZERS
from fusedadam.cli.harness.measure import Conditions, measure
from fusedadam.cli.harness.shapes import Shape, parameters
from fusedadam.cli.harness.timing import Pace

# Far more than a cache holds: beyond that, time is proportional to the number of parameters.
ON_CPU: list[Shape] = [(2048, 1024) for _ in range(4)]
ON_GPU: list[Shape] = [(4096, 4096) for _ in range(16)]
PACE = Pace(turns=5, seconds=0.1)
DAY = 86_400


@dataclass(frozen=True)
class Saving:
    """Milliseconds of one training step, as it is now and as it would be."""

    name: str  # ours
    peer: str
    peer_ms: float
    our_ms: float
    whole_ms: float  # of a training step, with the peer

    @property
    def possible(self) -> bool:
        """Whether the peer's step fits into the training step that it is a part of."""
        return self.peer_ms < self.whole_ms

    @property
    def faster_by(self) -> float:
        """Training steps per second, relative to now."""
        return self.whole_ms / (self.whole_ms - self.peer_ms + self.our_ms)

    @property
    def seconds_a_day(self) -> float:
        return DAY * (self.peer_ms - self.our_ms) / self.whole_ms

    def cells(self) -> list[str]:
        times = [self.name.split()[-1], f"{self.peer_ms:.1f}", f"{self.our_ms:.1f}"]
        if not self.possible:
            return [*times, "-", "-"]
        return [*times, f"{self.faster_by:.2f} x", f"{self.seconds_a_day / 60:+.0f} min"]


def estimated(count: float, steps_per_second: float, device: torch.device) -> list[Saving]:
    print(
        f"\nYour run: {count:.3g} parameters, {steps_per_second:g} steps a second. Measuring large steps ...",
        flush=True,
    )
    saved = savings(ms_per_parameter(device), count, steps_per_second)
    headers = ("optimizer", "peer's step (ms)", "ours (ms)", "your steps a second", "saved a day")
    display.table(headers, [saving.cells() for saving in saved])
    print(*filter(None, (impossible(saved), assumptions(device))), sep="\n")
    return saved


def ms_per_parameter(device: torch.device) -> dict[str, float]:
    """Of each optimizer of the demo, ours and its peer taking turns."""
    shapes, names, conditions = _shapes(device), list(OPTIMIZERS), Conditions(str(device), PACE)
    found: dict[str, float] = {}
    for peer, ours in zip(names[::2], names[1::2], strict=True):
        makes = {name: OPTIMIZERS[name] for name in (peer, ours)}
        (measured,) = measure(makes, [shapes], "float32", conditions)
        found |= {name: statistics.median(own.ms) / parameters(shapes) for name, own in measured.items()}
    return found


def savings(per_parameter: Mapping[str, float], count: float, steps_per_second: float) -> list[Saving]:
    names = list(per_parameter)
    return [
        Saving(ours, peer, per_parameter[peer] * count, per_parameter[ours] * count, 1e3 / steps_per_second)
        for peer, ours in zip(names[::2], names[1::2], strict=True)
    ]


def assumptions(device: torch.device) -> str:
    millions = parameters(_shapes(device)) / 1e6
    return (
        "Assumed: all of these parameters are on one such device, in float32, and you use the peer now; a step takes "
        f"as long for each parameter as it does here, where {millions:.0f} million in large matrices were measured; "
        "nothing else in your training changes, or runs at the same time as the optimizer."
    )


def impossible(saved: Sequence[Saving]) -> str | None:
    """Says so if a peer's step alone takes longer than the training step that the user gave."""
    names = [saving.peer for saving in saved if not saving.possible]
    if not names:
        return None
    return (
        f"-: a step of {', '.join(names)} would alone take longer than your training step. If your parameters are "
        "sharded over several devices, give the number on one of them."
    )


def _shapes(device: torch.device) -> list[Shape]:
    return ON_CPU if device.type == "cpu" else ON_GPU
