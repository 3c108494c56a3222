"""The optimizers of the demo and their peers, training copies of one model on the same batches.

They take turns of a few steps, so that their losses can be shown side by side. How fast they are is measured
afterwards: speed.py.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from fusedadam.catalog import CATALOG
from fusedadam.cli import contestants, display
from fusedadam.cli.contestants import OURS
from fusedadam.cli.demo.transformer import TinyTransformer
from fusedadam.cli.harness.contestant import state_bytes

TURN, LONGEST_TURN = 5, 2.0  # steps per turn, unless a round of turns would take longer than these seconds
# BertAdam has no bias correction, so its first steps are three times as large: training would diverge at 1e-3
OPTIONS = {name: dict(entry.usual) for name, entry in CATALOG.items()}
OPTIONS["BertAdam"] = {"lr": 2e-4, "weight_decay": 1e-2, "max_grad_norm": 1.0}
DEFAULT = [name for name, entry in CATALOG.items() if entry.core]
STORED = ("AdamW", "fusedadam-8bit")  # a bfloat16 model beside AdamW's in float32
CLIPPED, MAX_GRAD_NORM = "AdamW+clipping", 1.0
FEWEST = 40  # steps that make a curve
SMOOTHING = 8  # losses are averaged over this fraction of the steps
Named = tuple[str, str]  # an optimizer, and by whom


def optimizers_on(device: torch.device, asked: Sequence[str] | None = None) -> list[Named]:
    """AdamW comes first, and each of ours after its peer, the first one that is installed; without a peer it is left
    out. On a GPU, clipping in the step takes the place of Adam, which costs what AdamW does, unless it is asked for."""
    shown = {"Adam": CLIPPED} if asked is None and device.type != "cpu" else {}
    names = dict.fromkeys(["AdamW", *(DEFAULT if asked is None else asked)])
    peers = {name: contestants.first_peer(name) for name in names}
    return [(shown.get(name, name), by) for name, peer in peers.items() if peer for by in (peer, OURS)]


@dataclass(frozen=True)
class Result:
    """What one optimizer achieved."""

    name: str
    loss: float  # on held-out text
    losses: tuple[float, ...]  # of each training step
    bytes_a_parameter: float  # of weights and states


class Training:
    """One optimizer with its own copy of the model."""

    def __init__(self, optimizer: str, by: str, model: TinyTransformer, device: torch.device, steps: int) -> None:
        self.name = f"{by} {optimizer}"
        self.model = copy.deepcopy(model).to(device, torch.bfloat16 if by in contestants.PRESETS else None)
        self.params = list(self.model.parameters())
        kind, _, clipped = optimizer.partition("+")
        clipping = {"max_grad_norm": MAX_GRAD_NORM} if clipped and by == OURS else {}
        self.optimizer = contestants.make(kind, by, self.params, {**OPTIONS[kind], **clipping})
        if clipped and by != OURS:
            self.optimizer.register_step_pre_hook(self._clip)
        if by in contestants.PRESETS:  # with the low-order bits: all start from the same weights
            self.optimizer.load_float32_state_dict(self.model, model.state_dict())
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda done: lr_factor(done, steps))
        self.losses: list[float] = []

    def _clip(self, *_: object) -> None:
        clip_grad_norm_(self.params, MAX_GRAD_NORM)

    def step(self, windows: Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.model.loss(windows)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.item())
        return self.losses[-1]

    @torch.no_grad()
    def validate(self, windows: Tensor) -> float:
        """The loss on held-out text, with averaged weights if the optimizer has them."""
        averaged = getattr(self.optimizer, "ema_weights", contextlib.nullcontext)
        with averaged():
            return self.model.loss(windows).item()

    def result(self, held_out: Tensor) -> Result:
        kept = sum(p.nbytes for p in self.params) + state_bytes(self.optimizer, self.params)
        bytes_a_parameter = kept / sum(p.numel() for p in self.params)
        return Result(self.name, self.validate(held_out), tuple(self.losses), bytes_a_parameter)


def lr_factor(done: int, steps: int) -> float:
    """Rises, then falls to zero: at a constant lr, training soon magnifies differences in rounding."""
    return min(1.0, (done + 1) / max(1, steps // 12)) * (1 - done / steps)


def train(trainings: list[Training], batches: Iterable[Tensor], steps: int, seconds: float) -> int:
    """Trains until batches or ``seconds`` are used up, and returns the number of steps.

    Each of ours follows its peer; a last one without a peer is not shown meanwhile. If at half time ``FEWEST`` steps
    of all do not fit, the last pairs are given up, but not the first.
    """
    began, done, taken, turn_length, left = time.perf_counter(), 0, 0, 1, iter(batches)
    names = [training.name.split()[-1] for training in trainings[1::2]]
    print(f"Training loss, smoothed, peer/ours: {', '.join(names)}", flush=True)
    with display.progress(steps, "steps") as progress:
        while turn := list(itertools.islice(left, turn_length)):
            for training in trainings:
                for windows in turn:
                    training.step(windows)
            losses = [statistics.fmean(training.losses[-1 - steps // SMOOTHING :]) for training in trainings]
            pairs = zip(losses[::2], losses[1::2], strict=False)
            progress.done(" ".join(f"{peer:.3f}/{own:.3f}" for peer, own in pairs), len(turn))
            done, taken = done + len(turn), taken + len(turn) * len(trainings)
            spent = time.perf_counter() - began
            a_step = spent / taken  # of one training
            to_go = (FEWEST - done) * a_step
            while 2 * spent > seconds and spent + to_go * len(trainings) > seconds and len(trainings) > 3:
                del trainings[-3:-1]
            turn_length = TURN if TURN * a_step * len(trainings) < LONGEST_TURN else 1
            if done >= FEWEST and spent + turn_length * a_step * len(trainings) > seconds:
                break
    return done
