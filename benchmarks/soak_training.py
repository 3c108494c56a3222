"""The training of soak.py: small models, each with an optimizer of ours or with the reference implementation of it.

Everything that a training loop does to an optimizer happens here repeatedly, at steps that depend only on their number.
So a run with the reference goes through the same events, and must give the same losses.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from peers import adamp, beside, torch_fused
from torch import Tensor, nn

import fusedadam

# Each happens in every so many steps.
MISSING_GRADIENT, INFINITY, LOAD, REPLACE, EVALUATE = 7, 11, 13, 19, 5
GROWTH_INTERVAL = 6  # the scale doubles once between two infinities, each of which halves it
LATE_LAYERS = 3  # they join the optimizer one by one, in the first quarter of the run
BATCHES, BATCH_SIZE, INPUTS, HIDDEN, OUTPUTS = 64, 32, 16, 32, 4
MAX_NORM = 0.5


class AdamWWithAverage(torch.optim.AdamW):
    """torch's AdamW, and an average of the parameters made by plain operations: a reference for EmaAdamW."""

    def __init__(self, params: Any, ema_decay: float, **options: Any) -> None:
        super().__init__(params, foreach=True, **options)
        self.kept = ema_decay

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        before = {p: p.clone() for group in self.param_groups for p in group["params"] if p not in self.state}
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("ema_params", before.get(p)).lerp_(p, 1 - self.kept)

    @contextlib.contextmanager
    def ema_weights(self) -> Iterator[None]:
        trained = {p: p.detach().clone() for p, state in self.state.items() if "ema_params" in state}
        for p in trained:
            p.data.copy_(self.state[p]["ema_params"])
        yield
        for p, before in trained.items():
            p.data.copy_(before)


class Task(NamedTuple):
    """One of the trainings that take turns. ``inside``: ours clips in its step; ``before``: clip_grad_norm_ does."""

    name: str
    ours: Callable[..., torch.optim.Optimizer]
    reference: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any]
    clipping: str = ""  # "inside", "before", or not at all
    steady: bool = False  # only lr, betas and gradients ever change, so that all caches stay valid


DECAY = {"weight_decay": 0.01}
AVERAGED = {**DECAY, "ema_decay": 0.95}
TASKS = [
    Task("AdamW, steady", fusedadam.AdamW, torch_fused, DECAY, "inside", steady=True),
    Task("AdamW", fusedadam.AdamW, torch_fused, DECAY, "before"),
    Task("EmaAdamW", partial(fusedadam.EmaAdamW, ema_warmup=False), AdamWWithAverage, AVERAGED, "inside"),
    Task("AdamP", fusedadam.AdamP, adamp, DECAY, "before"),
    Task("BertAdam", fusedadam.BertAdam, beside("BertAdam"), DECAY),
]


class Student(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.last = nn.Linear(HIDDEN, OUTPUTS)
        self.late = nn.ModuleList(nn.Linear(INPUTS, OUTPUTS) for _ in range(LATE_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(nn.functional.gelu(self.norm(self.first(x))))
        for layer in self.late:
            y = y + layer(x)
        return y


class Training:
    """``steps`` of one task."""

    def __init__(self, task: Task, steps: int, device: str, is_ours: bool) -> None:
        self.task, self.steps, self.device, self.is_ours = task, steps, device, is_ours
        self.number = [one.name for one in TASKS].index(task.name)
        generator = torch.Generator().manual_seed(self.number)
        teacher = Student(seed=1000 + self.number)
        self.inputs = torch.randn(BATCHES, BATCH_SIZE, INPUTS, generator=generator)
        with torch.no_grad():
            self.targets = teacher(self.inputs).to(device)
        self.inputs = self.inputs.to(device)
        self.model = Student(seed=self.number).to(device)
        early = [p for name, p in self.model.named_parameters() if not name.startswith("late")]
        self.optimizer = self._optimizer([{"params": early}])
        self.scheduler = self._scheduler()
        self.scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=GROWTH_INTERVAL)
        self.losses = torch.full((steps,), torch.nan, device=device)
        self.averaged = torch.full((steps,), torch.nan, device=device)  # losses of the averaged weights
        self.seconds = np.zeros(steps)  # that the host spends in each step of the optimizer
        self.done = 0

    def _optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        make, options = self.task.reference, dict(self.task.options)
        if self.is_ours:
            make = self.task.ours
            options |= {"max_grad_norm": MAX_NORM} if self.task.clipping == "inside" else {}
        return make(groups, lr=1e-3, **options)

    def _scheduler(self) -> torch.optim.lr_scheduler.OneCycleLR:
        """Each task has betas of its own, so that no table of powers is shared between tasks."""
        momenta = {"base_momentum": 0.85 + 0.003 * self.number, "max_momentum": 0.95}
        has_betas = "betas" in self.optimizer.defaults
        return torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=3e-3, total_steps=self.steps, cycle_momentum=has_betas, **momenta
        )

    def step(self) -> None:
        k = self.done
        if not self.task.steady:
            self._disturb(k)
        self.model.zero_grad()
        loss = self._loss(k)
        self.scaler.scale(loss).backward()
        self.losses[k] = loss.detach()
        self._damage_gradients(k)
        self._clip()
        begin = time.perf_counter()
        self.scaler.step(self.optimizer)
        self.seconds[k] = time.perf_counter() - begin
        self.scaler.update()
        self._change_options(k)
        if isinstance(self.optimizer, (fusedadam.EmaAdamW, AdamWWithAverage)) and happens(EVALUATE, k):
            with self.optimizer.ema_weights(), torch.no_grad():
                self.averaged[k] = self._loss(k)
        self.done += 1

    def _loss(self, k: int) -> Tensor:
        half = torch.float16 if self.device == "cuda" else torch.bfloat16
        with torch.autocast(self.device, dtype=half):
            prediction = self.model(self.inputs[k % BATCHES])
        return nn.functional.mse_loss(prediction.float(), self.targets[k % BATCHES])

    def _disturb(self, k: int) -> None:
        for layer in range(LATE_LAYERS):
            if k == (layer + 1) * self.steps // (4 * LATE_LAYERS + 4):
                like = {name: value for name, value in self.optimizer.param_groups[0].items() if name != "params"}
                added = list(self.model.late[layer].parameters())
                self.optimizer.add_param_group({**like, "weight_decay": 0.0, "params": added})
        if happens(LOAD, k):
            self.optimizer.load_state_dict(self.optimizer.state_dict())
        if happens(REPLACE, k):
            saved, schedule = self.optimizer.state_dict(), self.scheduler.state_dict()
            self.optimizer = self._optimizer([{"params": group["params"]} for group in self.optimizer.param_groups])
            self.scheduler = self._scheduler()
            self.scheduler.load_state_dict(schedule)
            self.optimizer.load_state_dict(saved)

    def _damage_gradients(self, k: int) -> None:
        params = list(self.model.parameters())
        if happens(MISSING_GRADIENT, k) and not self.task.steady:
            params[k // MISSING_GRADIENT % 6].grad = None
        if happens(INFINITY, k):
            next(p.grad for p in params if p.grad is not None).view(-1)[0] = torch.inf

    def _clip(self) -> None:
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.task.clipping == "before" or (self.task.clipping == "inside" and not self.is_ours):
            self.scaler.unscale_(self.optimizer)
            (fusedadam.clip_grad_norm_ if self.is_ours else nn.utils.clip_grad_norm_)(params, MAX_NORM)

    def _change_options(self, k: int) -> None:
        self.scheduler.step()
        for group in self.optimizer.param_groups:
            if "b1" in group:  # BertAdam's name, which the scheduler does not know
                group["b1"] = 0.85 + 0.1 * (k + 1) / self.steps


def happens(every: int, k: int) -> bool:
    return k % every == every - 1
