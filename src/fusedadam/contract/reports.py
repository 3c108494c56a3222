"""What an optimizer can be asked after a step: gradient norm, values that its rule reports, skipped steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fusedadam import checks
from fusedadam.contract.stepper import Stepper
from fusedadam.engine.launch import norm_of
from fusedadam.engine.plan import Plan
from fusedadam.rules.norms import REPORTS
from fusedadam.rules.rule import Rule
from fusedadam.tensors.transfer import sent

if TYPE_CHECKING:
    from fusedadam.contract.base import FusedOptimizer
    from fusedadam.in_backward import InBackward


class Reports(torch.optim.Optimizer):
    """What FusedOptimizer (base.py) has for its users after a step, and the stepper that all of it is asked of."""

    rule: ClassVar[Rule]
    _stepper: Stepper
    _in_backward: InBackward | None = None
    _skipped: Tensor | int = 0  # steps, because a gradient was not finite
    _watches_norms = False

    @property
    def skipped_steps(self) -> int:
        """How many steps ``skip_nonfinite=True`` has left out since the optimizer was made; waits for the device."""
        return int(self._skipped)

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients in the last step, before clipping, on their device; None if nothing was clipped."""
        plan = self._stepper.last_plan
        return None if plan is None else norm_of(plan.launches, "grad_norm")

    @property
    def watch_norms(self) -> bool:
        """Whether steps measure the norms of gradients, updates and weights, for :meth:`norms`. It may change between
        any two steps; while it is False, as at first, norms cost nothing."""
        return self._watches_norms

    @watch_norms.setter
    def watch_norms(self, value: bool) -> None:
        checks.boolean("watch_norms", value)
        self._watches_norms = value

    def report(self, name: str) -> dict[Tensor, float]:
        """A value that the rule names in its ``reports``, of the last step of each parameter that took part in one.

        Waits for the device. A value that the options leave out, such as a norm where nothing is clipped, is reported
        for no parameter.
        """
        if name not in self.rule.reports:
            known = ", ".join(map(repr, self.rule.reports)) or "none"
            raise ValueError(f"{name!r} is not reported by {type(self).__name__}; its rule reports {known}")
        params = self._params()
        return {params[k]: value for k, value in sorted(self._report(name).items())}

    def _report(self, name: str) -> dict[int, float]:
        """A value of the last step for each parameter that took part, by its position among all."""
        in_backward = {} if self._in_backward is None else self._in_backward.report(name, self._params())
        return {**self._stepper.report(name), **in_backward}

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]


GRAD, UPDATE, WEIGHT = range(len(REPORTS))


@dataclass(frozen=True)
class Norms:
    """The norms of order 2 of the parameters that the last step has updated, in the order of the optimizer."""

    params: list[Tensor]
    names: list[str]  # as in ``named_parameters()``, or "0", "1", ... by position if the optimizer was given no names
    values: Tensor  # three columns, float64, on the device of the first parameter: see grad, update and weight

    @property
    def grad(self) -> Tensor:
        """Of the gradients, unscaled and before clipping: one value for each parameter."""
        return self.values[:, GRAD]

    @property
    def update(self) -> Tensor:
        """Of what the step has added to the weights, weight decay included."""
        return self.values[:, UPDATE]

    @property
    def weight(self) -> Tensor:
        """Of the weights after the step."""
        return self.values[:, WEIGHT]

    def as_dict(self) -> dict[str, dict[str, float]]:
        """By name: ``{"grad": ..., "update": ..., "weight": ...}``. Waits for the device, once."""
        rows = self.values.tolist()
        return {name: dict(zip(REPORTS, row, strict=True)) for name, row in zip(self.names, rows, strict=True)}


def of_last_step(optimizer: FusedOptimizer) -> Norms:
    checks.not_captured("norms() cannot be captured in a CUDA graph; call it after the replay")
    params, names, in_backward = optimizer._params(), _names(optimizer), optimizer._in_backward
    plans = [(plan, plan.indices) for plan in [optimizer._stepper.last_plan] if plan is not None]
    if in_backward is not None:
        plans += [(plan, [k]) for k, plan in in_backward.last_plans(params).items()]
    measured = [(plan, indices) for plan, indices in plans if plan.measures_norms]
    if not measured:
        raise RuntimeError(
            "the last step has measured no norms; set optimizer.watch_norms = True before the step that you want the "
            "norms of"
        )
    pieces = [piece for plan, indices in measured for piece in _pieces(plan, indices)]
    if not pieces:
        return Norms([], [], torch.zeros(0, len(REPORTS), dtype=torch.float64, device="cpu"))
    home = pieces[0][1].device
    values = torch.cat([piece.to(home) for _, piece in pieces])
    indices = np.array([k for found, _ in pieces for k in found], dtype=np.int64)
    order = indices.argsort()
    if not np.array_equal(order, np.arange(len(order))):
        values = values[sent(order, home)]
    return Norms([params[k] for k in indices[order]], [names[k] for k in indices[order]], values)


def _pieces(plan: Plan, indices: Sequence[int]) -> list[tuple[list[int], Tensor]]:
    """The norms of each launch, and the positions of their parameters among all of the optimizer."""
    tables = [launch.table for launch in plan.launches if not launch.table.is_absent]
    return [
        (
            [indices[k] for k in table.member_indices.tolist()],
            torch.stack([table.value(table.specialized.reports[name]) for name in REPORTS.values()], dim=1),
        )
        for table in tables
    ]


def _names(optimizer: FusedOptimizer) -> list[str]:
    names: list[str] = []
    for group in optimizer.param_groups:
        given: Any = group.get("param_names")
        positions = range(len(names), len(names) + len(group["params"]))
        names += map(str, positions if given is None else given)
    return names
