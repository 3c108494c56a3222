"""What an optimizer can be asked after a step: gradient norm, values that its rule reports, skipped steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fusedadam import checks
from fusedadam.contract.stepper import Stepper
from fusedadam.engine.launch import norm_of
from fusedadam.rules.rule import Rule

if TYPE_CHECKING:
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
