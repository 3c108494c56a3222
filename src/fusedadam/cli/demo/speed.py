"""How long an optimizer's step takes beside its peer's: steps alone, after the training, until enough are undisturbed.

Trainings share the machine with each other and with everything else, and on a busy one most of their steps say nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedadam.cli.demo.training import Training
from fusedadam.cli.harness.measure import Conditions, Measured, measure
from fusedadam.cli.harness.timing import Pace

PACE, LONGEST = Pace(turns=9, seconds=0.03), 2.5  # seconds for each pair, however busy the machine is
OURS, PEER = "ours", "peer"


@dataclass(frozen=True)
class Speed:
    """Milliseconds per step, medians of the turns. If other programs disturbed too many of them, there is no ratio, and
    the times are those of the fastest turns."""

    ours_ms: float
    peer_ms: float
    ratio: float | None  # the peer's time over ours, in the same turns

    def saved_percent(self, pass_ms: float | None) -> float | None:
        """How much less time than with the peer a training step takes."""
        if self.ratio is None or pass_ms is None:
            return None
        return 100 * (self.peer_ms - self.ours_ms) / (pass_ms + self.peer_ms)


class Pass:
    """A forward and a backward pass, as something that steps."""

    def __init__(self, training: Training, windows: Tensor) -> None:
        self.model, self.windows = training.model, windows

    def step(self) -> None:
        self.model.zero_grad()
        self.model.loss(self.windows).backward()


def compare(ours: Training, peer: Training, device: torch.device) -> Speed:
    """Steps with the gradients of the last batch."""
    found = _measured({OURS: ours.optimizer, PEER: peer.optimizer}, device)
    against = found[PEER].against_ours
    if not against:
        return Speed(min(found[OURS].ms), min(found[PEER].ms), None)
    return Speed(found[OURS].median_ms, found[PEER].median_ms, statistics.median(against))


def pass_ms(training: Training, windows: Tensor, device: torch.device) -> float | None:
    """Of a forward and backward pass; None if other programs disturbed it."""
    (found,) = _measured({"pass": Pass(training, windows)}, device).values()
    return None if found.disturbed else found.median_ms


def _measured(stepping: dict[str, Any], device: torch.device) -> dict[str, Measured]:
    makes: dict[str, Callable[..., Any]] = {name: (lambda _, own=own: own) for name, own in stepping.items()}
    return measure(makes, [], "float32", Conditions(str(device), PACE, longest=LONGEST))
