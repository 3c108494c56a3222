"""The step counts of all parameters: one flat tensor, of which each ``state["step"]`` is a view.

To torch and to state dicts they look as in torch.optim: a float32 CPU tensor without dimensions for each parameter. But
a thousand of them are counted up in one operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fusedadam.launch_table import Floats, Int64s

Places: TypeAlias = Int64s | slice


class StepCounts:
    def __init__(self) -> None:
        self._hold([])

    def _hold(self, values: list[float]) -> None:
        self._flat = torch.tensor(values, dtype=torch.float32, device="cpu")
        self._numbers = self._flat.numpy()

    def adopt(self, active: Sequence[dict[str, Any]], everyone: Iterable[dict[str, Any]]) -> Places:
        """Makes every ``step`` a view of one tensor, and says where those of ``active`` are."""
        self._numbers = self._flat.numpy()  # share_memory_() moves the storage under it
        if any(self._place(state.get("step")) is None for state in active):
            owners = [state for state in everyone if "step" in state]
            self._hold([float(state["step"]) for state in owners])
            for state, view in zip(owners, self._flat, strict=True):
                state["step"] = view
        places = np.array([self._place(state["step"]) for state in active], dtype=np.int64)
        everyone_in_order = np.array_equal(places, np.arange(len(self._flat)))
        return slice(None) if everyone_in_order else places

    def next(self, places: Places) -> Floats:
        """The numbers of the steps that are about to be taken."""
        return self._numbers[places] + np.float64(1)

    def set(self, places: Places, steps: Floats) -> None:
        self._numbers[places] = steps

    def _place(self, step: Any) -> int | None:
        if not isinstance(step, Tensor) or step.dtype != torch.float32 or step.device.type != "cpu":
            return None
        offset = step.data_ptr() - self._flat.data_ptr()
        return offset // 4 if 0 <= offset < 4 * len(self._flat) else None
