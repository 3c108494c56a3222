"""The optimizers of the demo and their peers, training copies of one model on the same batches.

They take turns of a few steps: whatever else the machine does at the time then slows all of them alike, and most steps
find the processor's caches as a training that is alone would.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fusedadam
from fusedadam.cli import display
from fusedadam.cli.peers import EMA_DECAY, AdamPLoop, BertAdamLoop, TorchAdamWWithEma, adamp_package
from fusedadam.cli.tiny_transformer import TinyTransformer

UNMEASURED = 10  # of the first steps: kernels are compiled and memory is set aside there
TURN, LONGEST_TURN = 5, 2.0  # steps, unless all together would take longer than so many seconds
ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 1e-2}
ADAM: dict[str, Any] = {"lr": 1e-3}  # no decay: inside the gradient it would undo what is learned about rare pairs
# without bias correction the first steps are three times as large: at 1e-3 the training would leave its course
BERT: dict[str, Any] = {"lr": 2e-4, "weight_decay": 1e-2, "max_grad_norm": 1.0}

# Ours, and before each its peer; the loops' cost is what people pay today.
ADAMP_PEER = "plain AdamP" if adamp_package() is None else "adamp AdamP"
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "torch AdamW": lambda params: torch.optim.AdamW(params, fused=True, **ADAMW),
    "fusedadam AdamW": lambda params: fusedadam.AdamW(params, **ADAMW),
    "torch Adam": lambda params: torch.optim.Adam(params, fused=True, **ADAM),
    "fusedadam Adam": lambda params: fusedadam.Adam(params, **ADAM),
    "torch AdamW + EMA": lambda params: TorchAdamWWithEma(params, **ADAMW),
    "fusedadam EmaAdamW": lambda params: fusedadam.EmaAdamW(params, ema_decay=EMA_DECAY, **ADAMW),
    ADAMP_PEER: lambda params: (adamp_package() or AdamPLoop)(params, **ADAMW),
    "fusedadam AdamP": lambda params: fusedadam.AdamP(params, **ADAMW),
    "plain BertAdam": lambda params: BertAdamLoop(params, **BERT),
    "fusedadam BertAdam": lambda params: fusedadam.BertAdam(params, **BERT),
}


@dataclass(frozen=True)
class Result:
    """What one optimizer reached; times are medians over the measured steps, in milliseconds."""

    name: str
    loss: float
    pass_ms: float  # forward and backward
    step_ms: float
    fastest_step_ms: float
    losses: tuple[float, ...] = ()  # while training, step by step


class Training:
    """One optimizer with its own copy of the model."""

    def __init__(self, name: str, model: TinyTransformer, device: torch.device, steps: int) -> None:
        self.name = name
        self.device = device
        self.model = copy.deepcopy(model).to(device)
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda done: lr_factor(done, steps))
        self.pass_times: list[float] = []
        self.step_times: list[float] = []
        self.losses: list[float] = []

    def step(self, windows: Tensor) -> float:
        started = self._now()
        self.optimizer.zero_grad()
        loss = self.model.loss(windows)
        loss.backward()
        passed = self._now()
        self.optimizer.step()
        self.step_times.append(1e3 * (self._now() - passed))
        self.pass_times.append(1e3 * (passed - started))
        self.schedule.step()
        self.losses.append(loss.item())
        return self.losses[-1]

    @torch.no_grad()
    def validate(self, windows: Tensor) -> float:
        """The loss on held-out text; an optimizer that averages the weights is judged by the average."""
        averaged = getattr(self.optimizer, "ema_weights", contextlib.nullcontext)
        with averaged():
            return self.model.loss(windows).item()

    def result(self, held_out: Tensor) -> Result:
        first = unmeasured(len(self.step_times))
        passes, steps = self.pass_times[first:], self.step_times[first:]
        pass_ms, step_ms = statistics.median(passes), statistics.median(steps)
        return Result(self.name, self.validate(held_out), pass_ms, step_ms, min(steps), tuple(self.losses))

    def _now(self) -> float:
        """Work on an accelerator is only queued when a call returns; a time means something once it is done."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


def lr_factor(done: int, steps: int) -> float:
    """Up, then down to nothing. At a constant lr, training soon magnifies differences in rounding to visible ones."""
    return min(1.0, (done + 1) / max(1, steps // 12)) * (1 - done / steps)


def unmeasured(steps: int) -> int:
    """How many of the first steps are not measured; of short runs, all but the last."""
    return min(UNMEASURED, steps - 1)


def train(trainings: Sequence[Training], batches: Iterable[Tensor], steps: int, seconds: float) -> int:
    """Trains until the batches are used up or the ``seconds`` would be, and returns how many steps that were."""
    now, done = time.perf_counter(), 0
    end, left, turn_length = now + seconds, iter(batches), 1
    with display.progress([t.name for t in trainings], steps) as advance:
        while turn := list(itertools.islice(left, turn_length)):
            began = now
            losses = [[training.step(windows) for windows in turn] for training in trainings]
            for each in zip(*losses, strict=True):
                advance(list(each))
            done, now = done + len(turn), time.perf_counter()
            turn_length = TURN if (now - began) / len(turn) * TURN < LONGEST_TURN else 1
            if now + (now - began) > end and done >= 2:  # one to compile, one to measure
                break
    return done
