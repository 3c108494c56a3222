"""The step counts of all parameters: one flat tensor for each home, of which each ``state["step"]`` is a view.

To torch and to state dicts they look as in torch.optim: a float32 tensor without dimensions for each parameter, on the
CPU, or on the parameter's device where the host cannot know the count (GradScaler, capturable). But a thousand of them
are counted up in one operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fusedadam.launch_table import Floats, Int64s
from fusedadam.transfer import capturing, sent

Places: TypeAlias = Int64s | slice
HOST = torch.device("cpu")


class StepCounts:
    def __init__(self) -> None:
        self._flats: dict[torch.device, Tensor] = {}
        self.in_graph = False
        self._hold(HOST, [])

    @property
    def on_device(self) -> bool:
        """Whether some counts are where the host does not know them."""
        return len(self._flats) > 1

    def flat(self, home: torch.device) -> Tensor:
        return self._flats[home]

    def adopt(self, active: Sequence[dict[str, Any]], everyone: Iterable[dict[str, Any]], home: torch.device) -> Places:
        """Makes every ``step`` that belongs there a view of one tensor, and says where those of ``active`` are."""
        self._numbers = self._flats[HOST].numpy()  # share_memory_() moves the storage under it
        if any(self._place(state.get("step"), home) is None for state in active):
            if capturing() or (home in self._flats and home != HOST and self.in_graph):
                raise RuntimeError(
                    "step counts would have to move, but a CUDA graph has captured where they are; take a step with "
                    "all parameters before the capture"
                )
            mine = set(map(id, active))
            owners = [s for s in everyone if id(s) in mine or ("step" in s and _home(s["step"]) == home)]
            self._hold(home, [state["step"] for state in owners])
            for state, view in zip(owners, self._flats[home], strict=True):
                state["step"] = view
        places = np.array([self._place(state["step"], home) for state in active], dtype=np.int64)
        everyone_in_order = np.array_equal(places, np.arange(len(self._flats[home])))
        return slice(None) if everyone_in_order else places

    def next(self, places: Places) -> Floats:
        """The numbers of the steps that are about to be taken, on the host."""
        return self._numbers[places] + np.float64(1)

    def set(self, places: Places, steps: Floats) -> None:
        self._numbers[places] = steps

    def _hold(self, home: torch.device, values: list[Any]) -> None:
        if home == HOST:
            numbers = torch.tensor([float(value) for value in values], dtype=torch.float32, device=HOST)
        elif all(_home(value) == HOST for value in values):
            numbers = sent(np.array([float(value) for value in values], dtype=np.float32), home)
        else:  # without asking the device for those that are there
            there = [torch.as_tensor(value, dtype=torch.float32).to(home).reshape(()) for value in values]
            numbers = torch.stack(there)
        self._flats[home] = numbers
        self._numbers = self._flats[HOST].numpy()

    def _place(self, step: Any, home: torch.device) -> int | None:
        flat = self._flats.get(home)
        if flat is None or not isinstance(step, Tensor) or step.dtype != torch.float32 or step.device != home:
            return None
        offset = step.data_ptr() - flat.data_ptr()
        return offset // 4 if 0 <= offset < 4 * len(flat) else None


def _home(step: Any) -> torch.device:
    return step.device if isinstance(step, Tensor) else HOST
