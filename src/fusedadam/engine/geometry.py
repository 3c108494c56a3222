"""How the elements of a launch are cut into rows, columns, segments and chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fusedadam.engine.member import Member
from fusedadam.rules.stages import Stage, Sum
from fusedadam.rules.sums import COLUMN_SEGMENT, SEGMENT
from fusedadam.tensors.shards import local_shape

Int64s: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]


class Geometry:
    """One entry for each member: its elements, as rows of equal width, each row in pieces of a segment's length.

    A tensor is one row, unless the rule sums by rows. Where rows themselves are sharded (``splits_rows``), this process
    has a part of each of its rows; it keeps a value for every row of the whole parameter, ``all_rows``, of which its
    own begin at ``first_rows``.

    For a rule with factored states a tensor is a number of matrices, its last two dimensions: each has ``heights``
    rows, and ``columns`` are the columns of all of them. This process keeps values for its own rows and columns alone.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        by_rows, self.is_factored = members[0].specialized.by_rows, members[0].specialized.is_factored
        shardings = [member.sharding for member in members]
        self.splits_rows = by_rows and not self.is_factored and shardings[0] is not None and shardings[0].splits_rows
        params = [member.roles["param"] for member in members]
        self.sizes: Int64s = np.array([p.numel() for p in params], dtype=np.int64)
        count = _rows_of_matrices if self.is_factored else _rows
        rows: Int64s = np.array([count(p) if by_rows else 1 for p in params], dtype=np.int64)
        self.rows: Int64s = rows * (self.sizes > 0)
        self.widths: Int64s = self.sizes // np.maximum(self.rows, 1)
        self.pieces: Int64s = -(-self.widths // SEGMENT["element"])
        self.all_rows, self.first_rows = self.rows, np.zeros_like(self.sizes)
        if self.splits_rows:
            self.all_rows = np.array([s.rows if s else 0 for s in shardings], dtype=np.int64)
            self.first_rows = np.array([s.first_row if s else 0 for s in shardings], dtype=np.int64)
        if self.is_factored:
            # here, even without a gradient: other processes may wait for this one's part of a sum
            wholes = [p if member.whole is None else member.whole for p, member in zip(params, members, strict=True)]
            shapes = [local_shape(whole) for whole in wholes]
            # a parameter without elements has no rows and columns to decide about: its states stay as they began
            any_elements = np.array([whole.numel() > 0 for whole in wholes])
            self.all_rows = any_elements * np.array([math.prod(shape[:-1]) for shape in shapes], dtype=np.int64)
            self.heights: Int64s = np.array([shape[-2] for shape in shapes], dtype=np.int64)
            columns = np.array([math.prod(shape[:-2]) * shape[-1] for shape in shapes], dtype=np.int64)
            self.columns: Int64s = any_elements * columns
            self.matrices: Int64s = any_elements * np.array([math.prod(shape[:-2]) for shape in shapes], dtype=np.int64)
            self.column_segments: Int64s = -(-self.heights // COLUMN_SEGMENT)  # how many segments a column has
        self.segments = {"element": self.rows * self.pieces, "row": -(-self.all_rows // SEGMENT["row"])}

    def __len__(self) -> int:
        return len(self.sizes)

    def needs_combining(self, summation: Sum) -> bool:
        """Whether the sums of segments have to be combined: not where each segment is a whole row, and the sum is by
        row; nor where each is a whole column."""
        if summation.over == "column":
            return bool((self.column_segments > 1).any())
        return summation.over != "row" or bool((self.pieces > 1).any())

    def segment_counts(self, summation: Sum) -> Int64s:
        """How many segments of each tensor have a sum of their own."""
        if summation.over == "column":
            return self.matrices * self.column_segments * self.widths
        return self.segments[summation.of]

    def counts(self, space: str) -> Int64s:
        """How many elements, rows or columns there are."""
        return self.sizes if space == "element" else self.all_rows if space == "row" else self.columns

    def lengths(self, stage: Stage) -> Int64s:
        """How long the segments of each tensor are, at most."""
        return np.minimum(self.widths if stage.space == "element" else self.all_rows, SEGMENT[stage.space])

    def column_chunks(self, block: int, only: Any = True) -> tuple[Int64s, Int64s]:
        """The visit that adds up columns: each chunk is a segment of ``block`` columns, counted matrix by matrix, then
        segment by segment."""
        blocks = -(-self.widths // block)
        return self.in_chunks(self.matrices * self.column_segments * blocks * only, np.ones_like(blocks))

    def chunks(self, stage: Stage, chunk_sizes: Int64s, only: Any = True) -> tuple[Int64s, Int64s]:
        """The work of a stage in chunks of ``chunk_sizes`` items (or segments, if the stage goes by segments)."""
        if stage.in_segments:
            return self.in_chunks(self.segments[stage.space] * only, chunk_sizes)
        return self.in_chunks(self.counts(stage.space) * only, chunk_sizes)

    @staticmethod
    def in_chunks(counts: Int64s, chunk_sizes: Int64s) -> tuple[Int64s, Int64s]:
        """For each chunk its tensor, and the item or segment that it begins with."""
        chunks = -(-counts // chunk_sizes)
        tensor = np.repeat(np.arange(len(chunks)), chunks)
        index = np.arange(len(tensor)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
        return tensor, index * chunk_sizes[tensor]


def _rows(param: Tensor) -> int:
    return param.shape[0] if param.dim() else 1


def _rows_of_matrices(param: Tensor) -> int:
    return math.prod(param.shape[:-1])
