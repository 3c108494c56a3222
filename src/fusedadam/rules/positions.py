"""When a value is known: in which round of a step, and in which phase of that round.

Every round visits all elements, and then decides about rows and tensors with what was summed up on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple


class Phase(IntEnum):
    ELEMENT = 0  # visit all elements: store what is final, add up terms by row or by tensor
    ROW = 1  # from the rows' sums: values by row, terms to be summed by tensor
    TENSOR = 2  # from the tensors' sums: values by tensor, terms to be summed by group or over all
    TENSOR_AFTER_SHARED_SUMS = 3  # from the sums over groups or over all
    ROW_AFTER_DECISION = 4  # from what was decided by tensor

    __hash__ = int.__hash__  # positions are looked up in every step, and Enum's own is slow

    @property
    def space(self) -> str:
        """What there is one value of: an element, a row or a tensor."""
        return _SPACES[self]


_SPACES = ("element", "row", "tensor", "tensor", "row")  # of each phase


class Position(NamedTuple):
    """A phase of a round. Positions are ordered as they are run."""

    round: int = 0
    phase: Phase = Phase.ELEMENT

    @property
    def next(self) -> Position:
        if self.phase == max(Phase):
            return Position(self.round + 1)
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
