"""Launches that are kept from call to call, for functions that are handed their tensors anew each time.

A call reuses the launches of an earlier one with like tensors: a snapshot compares the tensors, and only their
addresses are placed again. What is kept are numbers, never tensors.

A call takes its launches out of the cache and gives them back after the run, so an interrupt, or a destructor that
calls the same function, never finds launches that are in use or whose addresses are only half placed. Each thread has a
cache of its own. Launches are reused only on the stream they were made on: a kernel on another stream may still be
reading their tables.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fusedadam.engine.changes.names import CHANGED, MOVED
from fusedadam.engine.changes.snapshot import Slot, Snapshot
from fusedadam.engine.geometry import Int64s
from fusedadam.engine.launch import Launches, PlacedLaunches, increment_versions
from fusedadam.engine.member import Roles
from fusedadam.tensors.layout import extent
from fusedadam.tensors.transfer import current_streams

OWNER = object()  # the snapshot knows tensors as the state of a parameter; this stands for it


class KeptLaunches(PlacedLaunches):
    """``tensors``: of the members of ``launches``, first all of the first role, then all of the second, and so on."""

    def __init__(self, launches: Launches, tensors: Sequence[Tensor], roles: Sequence[str]) -> None:
        count = len(tensors) // len(roles)
        self._keys = [str(k) for k in range(len(tensors))]
        snapshot = Snapshot([Slot(-1, key, 0) for key in self._keys], [], self._as_states(tensors))
        slots_of = [{role: k * count + member for k, role in enumerate(roles)} for member in range(count)]
        super().__init__(launches, snapshot, slots_of)
        self.outputs = list(dict.fromkeys(role for one in launches for role in one.table.specialized.outputs))
        self._extents: Int64s = np.array([extent(tensor) for tensor in tensors], dtype=np.int64)
        self._devices = list(dict.fromkeys(tensor.device for tensor in tensors))
        self._streams = current_streams(self._devices)
        self._have_moved = False

    def fit(self, tensors: Sequence[Any]) -> bool:
        """Whether these are like the tensors before: everything is the same, apart from addresses."""
        answer, _ = self.snapshot.compare([], self._as_states(tensors))
        self._have_moved |= answer == MOVED
        return answer != CHANGED

    @property
    def may_share_memory(self) -> bool:
        """Whether some of the tensors that ``fit`` may share memory. Tensors that have not moved do not."""
        if not self._have_moved:
            return False
        begins = self.snapshot.addresses
        order = begins.argsort()
        return bool(((begins + self._extents)[order[:-1]] > begins[order[1:]]).any())

    @property
    def is_for_this_stream(self) -> bool:
        return self._streams == current_streams(self._devices)

    def run(self, roles: Sequence[Roles], written: Sequence[Tensor]) -> None:
        """Runs the launches on the tensors that ``fit``. ``roles``: as ``Launches.execute`` takes them; ``written``:
        the tensors whose autograd version is incremented."""
        if self._have_moved:
            self.place()
            self._have_moved = False
        self.launches.execute(roles)
        increment_versions(written)

    def _as_states(self, tensors: Sequence[Any]) -> dict[Any, Any]:
        return {OWNER: dict(zip(self._keys, tensors, strict=True))}


class LaunchCache(threading.local):
    """The launches that were used last in this thread, up to ``most`` of them."""

    def __init__(self, most: int) -> None:
        self._kept: dict[Any, KeptLaunches] = {}
        self._most = most

    def take(self, key: Any, tensors: Sequence[Any]) -> KeptLaunches | None:
        """Launches that fit these tensors, for the caller alone. ``key``: what they depend on beside tensors, and
        enough about these to find launches that are likely to fit."""
        kept = self._kept.pop(key, None)
        return kept if kept is not None and kept.fit(tensors) else None

    def give_back(self, key: Any, kept: KeptLaunches) -> None:
        self._kept[key] = kept
        while len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]
