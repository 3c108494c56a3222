"""Norms of gradients, updates and weights, as large trainings log them: ``optimizer.norms()``.

The step measures them, if ``optimizer.watch_norms`` asks it to (rules/norms.py). Here they are collected, without
waiting for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fusedadam import checks
from fusedadam.engine.plan import Plan
from fusedadam.rules.norms import REPORTS
from fusedadam.tensors.transfer import sent

if TYPE_CHECKING:
    from fusedadam.contract.base import FusedOptimizer

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
