"""When a value is known: in which round of a step, and in which phase of that round.

Every round visits all elements, and then decides about rows, columns and tensors with what was summed up on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple


class Phase(IntEnum):
    COLUMN_SUMS = 0  # visit all elements, column by column: add up terms by column
    ELEMENT = 1  # visit all elements: store what is final, add up terms by row or by tensor
    ROW = 2  # from the rows' sums: values by row, terms to be summed by matrix or by tensor
    COLUMN = 3  # from the columns' sums: values by column
    TENSOR = 4  # from the tensors' sums: values by tensor, terms to be summed by group or over all
    TENSOR_AFTER_SHARED_SUMS = 5  # from the sums over groups or over all
    ROW_AFTER_DECISION = 6  # from what was decided by matrix or by tensor
    COLUMN_AFTER_DECISION = 7  # from what was decided by tensor
    PRODUCTS = 8  # of what the elements stored for it: values by element, which the next round reads

    __hash__ = int.__hash__  # positions are looked up in every step, and Enum's own is slow

    @property
    def space(self) -> str:
        """What there is one value for: an element, a row, a column or a tensor."""
        return _SPACES[self]


# of each phase; the first one only adds up, and the last one multiplies matrices: neither computes values of its own
_SPACES = ("column sum", "element", "row", "column", "tensor", "tensor", "row", "column", "product")


class Position(NamedTuple):
    """A phase of a round. Positions are ordered as they are run."""

    round: int = 0
    phase: Phase = Phase.ELEMENT

    @property
    def next(self) -> Position:
        if self.phase == max(Phase):
            return Position(self.round + 1, min(Phase))
        return Position(self.round, Phase(self.phase + 1))

    def first_in(self, space: str) -> Position:
        """The first position of this space, from here on."""
        return self if self.phase.space == space else self.next.first_in(space)

    def until(self, end: Position) -> Iterator[Position]:
        """This position and the following ones, without ``end``."""
        position = self
        while position < end:
            yield position
            position = position.next


START = Position()
