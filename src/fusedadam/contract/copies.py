"""States that begin as copies of their parameters (``State(initial="param")``), such as averages of weights.

A copy is made with the plan of the first step. That step may be skipped, for an infinity or because a checkpoint only
wanted states to load into, and weights may be written before the next one. So a copy follows its parameter until a step
is known to be counted. Where only the device knows, it is asked without waiting; until the answer arrives, the device
itself decides which copies still follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusedadam.contract import role_arrays
from fusedadam.contract.storage import States
from fusedadam.formats import names_in
from fusedadam.tensors.transfer import NOT_YET, capturing, requested


@dataclass
class Copies:
    params: dict[Tensor, Any] = field(default_factory=dict)  # whose copies follow, and their counts at the beginning
    _requested: list[tuple[list[Tensor], Tensor]] = field(default_factory=list)  # whether they were counted since

    def begin(self, role: str, param: Tensor, before: Mapping[str, Any], states: States) -> None:
        """Called when a role gets new arrays; ``before``: the state until now."""
        if role in states and states[role].initial == "param" and not names_in(role, before):
            step = before.get("step", 0.0)
            self.params[param] = step.detach().clone() if isinstance(step, Tensor) else step
            self._requested = [(p, answers) for p, answers in self._requested if all(each is not param for each in p)]

    @torch.no_grad()
    def refresh(self, known: Mapping[Any, Any], states: States, params: Sequence[Tensor] | None = None) -> None:
        """Makes copies equal to their parameters where no step has been counted. ``params``: all unless given."""
        self._receive()
        copies = [role for role, declared in states.items() if declared.initial == "param"]
        chosen = None if params is None else set(params)
        for param, begun in [*self.params.items()]:  # a copy: another thread may save the states
            state = known.get(param, {})
            if "step" in state and (chosen is None or param in chosen):
                is_new = torch.as_tensor(state["step"] == begun).reshape(())
                for role in copies:
                    role_arrays.refresh_copy(role, param, state, states, is_new)

    def settle(self, known: Mapping[Any, Any]) -> None:
        """Called after a step while any follow: asks which of them were counted, and no longer do."""
        if capturing():
            return
        self._receive()
        waiting = {param for params, _ in self._requested for param in params}
        by_device: dict[torch.device, dict[Tensor, Tensor]] = {}
        for param, begun in [*self.params.items()]:
            step = known.get(param, {}).get("step")
            if isinstance(step, Tensor) and param.grad is not None and param not in waiting:
                by_device.setdefault(step.device, {})[param] = (step != begun).float().reshape(())
        for was_counted in by_device.values():
            self._requested.append(([*was_counted], requested(torch.stack([*was_counted.values()]))))
        self._receive()

    def _receive(self) -> None:
        waiting = []
        for params, answers in self._requested:
            numbers = answers.tolist()
            for param, answer in zip(params, numbers, strict=True):
                if answer == 1:
                    self.params.pop(param, None)
            if NOT_YET in numbers:
                waiting.append((params, answers))
        self._requested = waiting
