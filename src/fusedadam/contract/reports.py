"""What an optimizer can be asked after a step: gradient norm, values that its rule reports, skipped steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fusedadam import checks
from fusedadam.contract.stepper import Stepper
from fusedadam.engine.launch import norm_of
from fusedadam.engine.launch_table import GRADS_ANYWHERE
from fusedadam.engine.plan import Plan
from fusedadam.rules.norms import REPORTS
from fusedadam.rules.rule import Rule
from fusedadam.tensors import host_memory
from fusedadam.tensors.transfer import sent

if TYPE_CHECKING:
    from fusedadam.in_backward import InBackward


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
        """The norm of all gradients in the last step, before clipping, on their device. None if nothing was clipped,
        and after ``load_state_dict`` until the next step."""
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

    def wait(self) -> None:
        """Waits until the last step is done. With ``offload=True``, call it before you read ``optimizer.state``, which
        is host memory that the device may still be writing; everything else here waits by itself."""
        checks.not_captured("wait() cannot be captured in a CUDA graph; call it after the replay")
        host_memory.wait()

    def report(self, name: str) -> dict[Tensor, float]:
        """A value that the rule names in its ``reports``, for each parameter, from the last step that it took part in.

        Waits for the device. Parameters whose options leave the value out, such as a norm where nothing is clipped, are
        missing.
        """
        if name not in self.rule.reports:
            known = ", ".join(map(repr, self.rule.reports)) or "none"
            raise ValueError(f"{name!r} is not reported by {type(self).__name__}; its rule reports {known}")
        params = self._params()
        return {params[k]: value for k, value in sorted(self._report(name).items())}

    def _report(self, name: str) -> dict[int, float]:
        """By the positions of the parameters among all of the optimizer."""
        found: dict[int, float] = {}
        for plan, indices in self._last_plans():
            for table, values in plan.launches.report(name):
                rows = zip(
                    table.member_indices.tolist(), values.tolist(), table.value(GRADS_ANYWHERE).tolist(), strict=True
                )
                found |= {indices[k]: value for k, value, grads in rows if grads}
        return found

    def norms(self) -> Norms:
        """The norms of each parameter's gradient, update and weights in the last step, if ``watch_norms`` was True.
        These tensors are on the device, so the call does not wait. A sharded parameter has the norms of the whole."""
        checks.not_captured("norms() cannot be captured in a CUDA graph; call it after the replay")
        measured = [(plan, indices) for plan, indices in self._last_plans() if plan.measures_norms]
        if not measured:
            raise RuntimeError(
                "the last step has measured no norms; set optimizer.watch_norms = True before the step that you want "
                "the norms of"
            )
        tables = [(launch.table, of) for plan, of in measured for launch in plan.launches if not launch.table.is_absent]
        if not tables:
            return Norms([], [], torch.zeros(0, len(REPORTS), dtype=torch.float64, device="cpu"))
        pieces = [
            torch.stack([table.value(table.specialized.reports[name]) for name in REPORTS.values()], dim=1)
            for table, _ in tables
        ]
        home = pieces[0].device
        values = torch.cat([piece.to(home) for piece in pieces])
        indices = np.array([of[k] for table, of in tables for k in table.member_indices.tolist()], dtype=np.int64)
        order = indices.argsort()
        if not np.array_equal(order, np.arange(len(order))):
            values = values[sent(order, home)]
        params, names = self._params(), self._names()
        return Norms([params[k] for k in indices[order]], [names[k] for k in indices[order]], values)

    def _last_plans(self) -> list[tuple[Plan, list[int]]]:
        """The plans of the last steps, each with the positions of its members among all parameters."""
        plan = self._stepper.last_plan
        own = [] if plan is None else [(plan, plan.indices)]
        return own if self._in_backward is None else own + self._in_backward.last_plans(self._params())

    def _names(self) -> list[str]:
        names: list[str] = []
        for group in self.param_groups:
            given: Any = group.get("param_names")
            positions = range(len(names), len(names) + len(group["params"]))
            names += map(str, positions if given is None else given)
        return names

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]
