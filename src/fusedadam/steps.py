"""The step counts of all parameters: one flat tensor, of which each ``state["step"]`` is a view.

To torch and to state dicts they look as in torch.optim: a float32 CPU tensor without dimensions for each parameter. But
a thousand of them are counted up in one operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedadam.launch_table import Floats, Int64s


class StepCounts:
    def __init__(self) -> None:
        self._flat = torch.zeros(0, dtype=torch.float32, device="cpu")

    def adopt(self, active: Sequence[dict[str, Any]], everyone: Iterable[dict[str, Any]]) -> Int64s:
        """Makes every ``step`` a view of one tensor, and says where those of ``active`` are."""
        if any(self._place(state.get("step")) is None for state in active):
            owners = [state for state in everyone if "step" in state]
            values = [float(state["step"]) for state in owners]
            self._flat = torch.tensor(values, dtype=torch.float32, device="cpu")
            for state, view in zip(owners, self._flat, strict=True):
                state["step"] = view
        return np.array([self._place(state["step"]) for state in active], dtype=np.int64)

    def next(self, places: Int64s) -> Floats:
        """The numbers of the steps that are about to be taken."""
        return self._flat.numpy()[places].astype(np.float64) + 1

    def advance(self, places: Int64s) -> None:
        self._flat.numpy()[places] += 1

    def _place(self, step: Any) -> int | None:
        if not isinstance(step, Tensor) or step.dtype != torch.float32 or step.device.type != "cpu":
            return None
        offset = step.data_ptr() - self._flat.data_ptr()
        return offset // 4 if 0 <= offset < 4 * len(self._flat) else None
