"""How the elements of a launch are cut into rows, segments and chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fusedadam.engine.member import Member
from fusedadam.rules.stages import Stage, Sum
from fusedadam.rules.sums import SEGMENT

Int64s: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]


class Geometry:
    """One entry for each member: its elements, as rows of equal width, each row in pieces of a segment's length.

    A tensor is one row, unless the rule sums by rows. Where rows themselves are sharded (``splits_rows``), this process
    has a part of each of its rows; it keeps a value for every row of the whole parameter, ``all_rows``, of which its
    own begin at ``first_rows``.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        by_rows = members[0].specialized.by_rows
        shardings = [member.sharding for member in members]
        self.splits_rows = by_rows and shardings[0] is not None and shardings[0].splits_rows
        params = [member.roles["param"] for member in members]
        self.sizes: Int64s = np.array([p.numel() for p in params], dtype=np.int64)
        rows: Int64s = np.array([p.shape[0] if by_rows and p.dim() else 1 for p in params])
        self.rows: Int64s = rows * (self.sizes > 0)
        self.widths: Int64s = self.sizes // np.maximum(self.rows, 1)
        self.pieces: Int64s = -(-self.widths // SEGMENT["element"])
        self.all_rows, self.first_rows = self.rows, np.zeros_like(self.sizes)
        if self.splits_rows:
            self.all_rows = np.array([s.rows if s else 0 for s in shardings], dtype=np.int64)
            self.first_rows = np.array([s.first_row if s else 0 for s in shardings], dtype=np.int64)
        self.segments = {"element": self.rows * self.pieces, "row": -(-self.all_rows // SEGMENT["row"])}

    def __len__(self) -> int:
        return len(self.sizes)

    def needs_combining(self, summation: Sum) -> bool:
        """Whether the sums of segments have to be combined: not where each segment is a whole row, and the sum is by
        row."""
        return summation.over != "row" or bool((self.pieces > 1).any())

    def lengths(self, stage: Stage) -> Int64s:
        """How long the segments of each tensor are, at most."""
        return np.minimum(self.widths if stage.space == "element" else self.all_rows, SEGMENT[stage.space])

    def chunks(self, stage: Stage, chunk_sizes: Int64s, only: Any = True) -> tuple[Int64s, Int64s]:
        """The work of a stage in chunks of ``chunk_sizes`` items (or segments, if the stage goes by segments)."""
        if stage.in_segments:
            return self.in_chunks(self.segments[stage.space] * only, chunk_sizes)
        return self.in_chunks((self.sizes if stage.space == "element" else self.all_rows) * only, chunk_sizes)

    @staticmethod
    def in_chunks(counts: Int64s, chunk_sizes: Int64s) -> tuple[Int64s, Int64s]:
        """For each chunk its tensor, and the item or segment that it begins with."""
        chunks = -(-counts // chunk_sizes)
        tensor = np.repeat(np.arange(len(chunks)), chunks)
        index = np.arange(len(tensor)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
        return tensor, index * chunk_sizes[tensor]
