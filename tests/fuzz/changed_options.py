"""Options that are changed in ``param_groups``, by the program or by torch's schedulers."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition

from tests.fuzz.options import LR_KINDS, Change, Flags, lr_of
from tests.fuzz.program import Program, a_group, event

a_change = st.runner().flatmap(lambda program: st.sampled_from(program.family.changes))


def _flags_of_a_group(program: Any) -> st.SearchStrategy[tuple[int, Flags]]:
    def of(group: int) -> st.SearchStrategy[tuple[int, Flags]]:
        rows = program.family.rows(program.options[group]["backend"])
        return st.tuples(st.just(group), st.sampled_from(rows))

    return st.sampled_from(range(len(program.options))).flatmap(of)


class ChangedOptions(Program):
    scheduler: Any = None

    @event(group=a_group, change=a_change)
    def set_option(self, group: int, change: Change) -> None:
        name, value = change
        self.optimizer.param_groups[group][name] = self.options[group][name] = value

    @event(change=st.runner().flatmap(_flags_of_a_group))
    def set_flags(self, change: tuple[int, Flags]) -> None:
        group, flags = change
        self.optimizer.param_groups[group].update(flags)
        self.options[group].update(flags)

    @event(group=a_group, kind=st.sampled_from(LR_KINDS), value=st.sampled_from([0.1, 0.01]))
    def set_lr(self, group: int, kind: str, value: float) -> None:
        self.optimizer.param_groups[group]["lr"] = lr_of(kind, value)
        self.options[group]["lr"] = value

    @event(group=a_group, value=st.sampled_from([0.1, 0.01]))
    def set_lr_in_place(self, group: int, value: float) -> None:
        lr = self.optimizer.param_groups[group]["lr"]
        if isinstance(lr, torch.Tensor):
            lr.fill_(value)
            self.options[group]["lr"] = float(value)

    @precondition(lambda self: self.scheduler is None)
    @event(kind=st.sampled_from(["OneCycleLR", "CosineAnnealingLR", "LambdaLR"]))
    def make_scheduler(self, kind: str) -> None:
        make = getattr(torch.optim.lr_scheduler, kind)
        arguments: dict[str, Any] = {
            "OneCycleLR": {"max_lr": 0.1, "total_steps": 100, "cycle_momentum": "betas" in self.options[0]},
            "CosineAnnealingLR": {"T_max": 5},
            "LambdaLR": {"lr_lambda": lambda epoch: 1 / (1 + epoch)},
        }[kind]
        self.scheduler = self.optimizer, make(self.optimizer, **arguments)
        self._read_scheduled()

    @precondition(lambda self: self.scheduler is not None)
    @event()
    def step_scheduler(self) -> None:
        optimizer, scheduler = self.scheduler
        if optimizer is self.optimizer and len(scheduler.base_lrs) == len(self.options):
            scheduler.step()
            self._read_scheduled()
        else:  # the optimizer has been replaced, or has got more groups
            self.scheduler = None

    def _read_scheduled(self) -> None:
        """The schedulers are torch's own, so the record takes their values as they are."""
        for options, group in zip(self.options, self.optimizer.param_groups, strict=True):
            options["lr"] = float(group["lr"])
            options.update({name: group[name] for name in ("betas",) if name in group})
