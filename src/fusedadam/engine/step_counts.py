"""The step counts of all parameters: one flat tensor per device, of which each ``state["step"]`` is a view.

To torch and to state dicts they look as in torch.optim: for each parameter a float32 tensor without dimensions, on the
CPU, or on the parameter's device if the host cannot know the count (GradScaler, capturable). But one operation
increments thousands of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fusedadam.engine.geometry import Floats, Int64s
from fusedadam.tensors.transfer import capturing, sent

Places: TypeAlias = Int64s | slice
HOST = torch.device("cpu")


class Counts(NamedTuple):
    """Prepared counts: the ``flat`` tensor, each owner's position in it, and the owners' new views of it, if any."""

    home: torch.device
    flat: Tensor
    positions: dict[Any, int]
    views: dict[Any, Tensor]

    def places(self, owners: Iterable[Any]) -> Places:
        """The positions of these owners' counts, as a slice if they are all counts in order."""
        places = np.array([self.positions[owner] for owner in owners], dtype=np.int64)
        return slice(None) if np.array_equal(places, np.arange(len(self.flat))) else places


class StepCounts:
    def __init__(self) -> None:
        self._flats: dict[torch.device, Tensor] = {HOST: _flat([], HOST)}
        self._numbers = self._flats[HOST].numpy()
        self._left = b"", 0.0  # all counts on the host as the last step left them, and the number they have in common
        self.in_graph = False  # whether a CUDA graph has captured addresses of counts

    @property
    def on_device(self) -> bool:
        """Whether the host does not know some of the counts."""
        return len(self._flats) > 1

    def prepare(self, active: Mapping[Any, Any], all_counts: Mapping[Any, Any], home: torch.device) -> Counts:
        """Prepares one tensor for all counts on this device. It may raise, and changes nothing: ``take`` does.

        ``active`` are the current counts of the parameters in this step, ``all_counts`` those of all parameters.
        """
        places = {owner: self._place(step, home) for owner, step in active.items()}
        if None not in places.values():
            return Counts(home, self._flats[home], places, {})  # type: ignore[arg-type]
        if capturing() or (home in self._flats and home != HOST and self.in_graph):
            raise RuntimeError(
                "step counts would have to move, but a CUDA graph has captured their addresses; take a step with "
                "all parameters before the capture"
            )
        values = {owner: step for owner, step in all_counts.items() if _home(step) == home} | dict(active)
        flat = _flat(list(values.values()), home)
        return Counts(home, flat, {owner: k for k, owner in enumerate(values)}, dict(zip(values, flat, strict=True)))

    def take(self, counts: Counts, states: dict[Any, dict[str, Any]]) -> None:
        """Makes prepared counts the current ones. This cannot fail."""
        for owner, view in counts.views.items():
            states[owner]["step"] = view
        self._flats[counts.home] = counts.flat
        self._numbers = self._flats[HOST].numpy()  # every time: share_memory_() may have moved the storage

    def next(self, places: Places) -> float | Floats:
        """The numbers of the next steps, for counts on the host; only one if they are equal, as nearly always."""
        counts, common = self._left
        if isinstance(places, slice) and self._numbers.tobytes() == counts:  # faster than any comparison of numbers
            return common + 1
        steps: Floats = self._numbers[places] + np.float64(1)
        return float(steps[0]) if len(steps) and steps.min() == steps.max() else steps

    def set(self, places: Places, steps: float | Floats) -> None:
        self._numbers[places] = steps
        if isinstance(places, slice) and isinstance(steps, float):
            self._left = self._numbers.tobytes(), float(np.float32(steps))

    def _place(self, step: Any, home: torch.device) -> int | None:
        """The position of a count in the flat tensor, or None if it is no view of it."""
        flat = self._flats.get(home)
        if flat is None or not isinstance(step, Tensor) or step.dtype != torch.float32 or step.device != home:
            return None
        offset = step.data_ptr() - flat.data_ptr()
        return offset // 4 if 0 <= offset < 4 * len(flat) else None


def _flat(values: list[Any], home: torch.device) -> Tensor:
    """The counts as one tensor on this device."""
    if home == HOST:
        return torch.tensor([float(value) for value in values], dtype=torch.float32, device=HOST)
    if all(_home(value) == HOST for value in values):
        return sent(np.array([float(value) for value in values], dtype=np.float32), home)
    # without waiting for the device to read counts that are already on it
    return torch.stack([torch.as_tensor(value, dtype=torch.float32).to(home).reshape(()) for value in values])


def _home(step: Any) -> torch.device:
    return step.device if isinstance(step, Tensor) else HOST
