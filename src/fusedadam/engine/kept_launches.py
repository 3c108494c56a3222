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
from fusedadam.engine.launch import Launches
from fusedadam.tensors.layout import extent
from fusedadam.tensors.transfer import current_streams

OWNER = object()  # the snapshot knows tensors as the state of a parameter; this stands for it


class KeptLaunches:
    """``tensors``: of the members of ``launches``, first all of the first role, then all of the second, and so on."""

    def __init__(self, launches: Launches, tensors: Sequence[Tensor], roles: Sequence[str]) -> None:
        self.launches, count = launches, len(tensors) // len(roles)
        self.outputs = list(dict.fromkeys(role for one in launches for role in one.table.specialized.outputs))
        self._keys = [str(k) for k in range(len(tensors))]
        slots = [Slot(-1, key, 0) for key in self._keys]
        self._snapshot = Snapshot(slots, [], self._as_states(tensors))
        self._extents: Int64s = np.array([extent(tensor) for tensor in tensors], dtype=np.int64)
        first = {role: k * count for k, role in enumerate(roles)}
        self._address_slots = [
            (table, np.array([first[name] + table.member_indices for name in table.arrays]))
            for table in (launch.table for launch in launches)
        ]
        self._devices = list(dict.fromkeys(tensor.device for tensor in tensors))
        self._streams = current_streams(self._devices)
        self._to_place = False

    def fit(self, tensors: Sequence[Any]) -> bool:
        """Whether these are like the tensors before: everything is the same, apart from addresses."""
        answer, _ = self._snapshot.compare([], self._as_states(tensors))
        self._to_place |= answer == MOVED
        return answer != CHANGED

    @property
    def may_share_memory(self) -> bool:
        """Whether some of the tensors that ``fit`` may share memory. Tensors that have not moved do not."""
        if not self._to_place:
            return False
        begins = self._snapshot.addresses
        order = begins.argsort()
        return bool(((begins + self._extents)[order[:-1]] > begins[order[1:]]).any())

    @property
    def is_for_this_stream(self) -> bool:
        return self._streams == current_streams(self._devices)

    def place(self) -> None:
        """Gives the addresses of the tensors to the launches."""
        if self._to_place:
            for table, slots in self._address_slots:
                table.place(self._snapshot.addresses[slots])
            self._to_place = False

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
