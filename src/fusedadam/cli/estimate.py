"""What somebody's own run would save: time a parameter, measured here, times the parameters that they have."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fusedadam.cli.bench.shapes import Shape, parameters
from fusedadam.cli.bench.timing import Pace, compare, parameters_with_gradients
from fusedadam.cli.side_by_side import OPTIMIZERS

# Far more than a cache holds: beyond that, time grows as the number of parameters does.
ON_CPU: list[Shape] = [(2048, 1024) for _ in range(4)]
ON_GPU: list[Shape] = [(4096, 4096) for _ in range(16)]
PACE = Pace(turns=5, seconds=0.1)
DAY = 86_400


@dataclass(frozen=True)
class Saving:
    """Milliseconds of one step of a training, as it is now and as it would be."""

    name: str  # ours
    peer: str
    peer_ms: float
    our_ms: float
    whole_ms: float  # of a training step, with the peer

    @property
    def possible(self) -> bool:
        """Whether the peer's step fits into the training step that it is said to be a part of."""
        return self.peer_ms < self.whole_ms

    @property
    def saved_ms(self) -> float:
        return self.peer_ms - self.our_ms

    @property
    def faster_by(self) -> float:
        """How many times as many training steps there would be."""
        return self.whole_ms / (self.whole_ms - self.saved_ms)

    @property
    def seconds_a_day(self) -> float:
        """Of the time that the same number of steps takes now."""
        return DAY * self.saved_ms / self.whole_ms


def ms_per_parameter(device: torch.device) -> dict[str, float]:
    """A step of each optimizer of the demo, ours and its peer taking turns."""
    shapes, names = _shapes(device), list(OPTIMIZERS)
    found: dict[str, float] = {}
    for pair in zip(names[::2], names[1::2], strict=True):
        made = {n: OPTIMIZERS[n](parameters_with_gradients(shapes, str(device), torch.float32)) for n in pair}
        times = compare({name: one.step for name, one in made.items()}, str(device), PACE)
        found |= {name: statistics.median(ms) / parameters(shapes) for name, ms in times.items()}
    return found


def assumptions(device: torch.device) -> str:
    millions = parameters(_shapes(device)) / 1e6
    return (
        "Assumed: all of these parameters are on one such device, in float32, and you use the peer now; a step takes "
        f"as long for each of them as it does here, where {millions:.0f} million in large matrices were measured; "
        "nothing else in your training changes, or runs while the optimizer does."
    )


def impossible(saved: Sequence[Saving]) -> str | None:
    """What was given cannot be, if a peer's step alone takes longer than the whole training step."""
    names = [saving.peer for saving in saved if not saving.possible]
    if not names:
        return None
    return (
        f"-: a step of {', '.join(names)} would alone take longer than your training step. If your parameters are "
        "spread over several devices, give those of one."
    )


def _shapes(device: torch.device) -> list[Shape]:
    return ON_CPU if device.type == "cpu" else ON_GPU


def savings(per_parameter: Mapping[str, float], count: float, steps_per_second: float) -> list[Saving]:
    names = list(per_parameter)
    return [
        Saving(ours, peer, per_parameter[peer] * count, per_parameter[ours] * count, 1e3 / steps_per_second)
        for peer, ours in zip(names[::2], names[1::2], strict=True)
    ]


def cells(saving: Saving) -> list[str]:
    both = [saving.name.split()[-1], f"{saving.peer_ms:.1f}", f"{saving.our_ms:.1f}"]
    if not saving.possible:
        return [*both, "-", "-"]
    return [*both, f"{saving.faster_by:.2f} x", f"{saving.seconds_a_day / 60:+.0f} min"]


HEADERS = ("optimizer", "peer's step (ms)", "ours (ms)", "your steps a second", "saved a day")
