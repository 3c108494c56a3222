"""Launches whose tensors may move between runs: a snapshot finds them, and the tables take their addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fusedadam.engine.changes.snapshot import Snapshot
from fusedadam.engine.launch import Launches


class PlacedLaunches:
    """``slots_of[k]``: the slot of the snapshot for each array of the k-th member, such as
    ``{"param": 0, "grad": 1, "exp_avg": 2}``; empty if the member is absent."""

    def __init__(self, launches: Launches, snapshot: Snapshot, slots_of: Sequence[Mapping[str, int]]) -> None:
        self.launches, self.snapshot, self.slots_of = launches, snapshot, slots_of
        self._address_slots = [  # of each table, [arrays, members]
            (table, np.array([[slots_of[k][name] for k in table.member_indices.tolist()] for name in table.arrays]))
            for table in (launch.table for launch in launches)
            if not table.is_absent
        ]

    def place(self) -> None:
        """Takes the present addresses from the snapshot to the tables."""
        for table, slots in self._address_slots:
            table.place(self.snapshot.addresses[slots])
