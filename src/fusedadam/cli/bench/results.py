"""What was measured, as plain data: the JSON file is this and nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fusedadam.cli.contestants import OURS, Absent

VERSION = 1  # of the JSON file


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        median = statistics.median(values)
        if len(values) < 2:
            return cls(median, median, median)
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    @property
    def percent(self) -> float:
        """Half the distance of the quartiles, in percent of the median."""
        return 50 * (self.high - self.low) / self.median


@dataclass(frozen=True)
class Result:
    """One implementation of an optimizer on one set of parameters. If it failed, there is a reason and no figure."""

    optimizer: str
    by: str
    set: str
    dtype: str
    failed: str | None = None
    ms: Spread | None = None
    turns: int = 0
    against_ours: Spread | None = None  # its time in a turn over ours in the same turn; None for ours
    bytes_moved: int | None = None
    copy_gb_s: float | None = None  # of large copies in the same processes and turns, ours and its peers'
    host_ms: float | None = None  # None on a CPU, where all of it is
    state_bytes: int | None = None
    extra_bytes: int | None = None

    @property
    def is_ours(self) -> bool:
        return self.by == OURS

    @property
    def roofline_ms(self) -> float | None:
        """The time in which a large copy moves as many bytes."""
        if self.bytes_moved is None or self.copy_gb_s is None:
            return None
        return self.bytes_moved / self.copy_gb_s / 1e6

    @property
    def percent_of_copy(self) -> float | None:
        return None if self.roofline_ms is None or self.ms is None else 100 * self.roofline_ms / self.ms.median


@dataclass(frozen=True)
class Point:
    """``x`` elements in one tensor, or tensors of a fixed size."""

    x: int
    ms: Spread
    roofline_ms: float | None


@dataclass(frozen=True)
class Curve:
    """How the time of one implementation grows."""

    over: str  # "elements" or "tensors"
    optimizer: str
    by: str
    dtype: str
    points: tuple[Point, ...]
    failed: str | None = None


@dataclass(frozen=True)
class Set:
    """Parameters that are stepped over together."""

    name: str
    tensors: int
    parameters: int
    divided_by: int = 1  # its widths, to suit the machine

    @property
    def described(self) -> str:
        scaled = f", widths divided by {self.divided_by}" if self.divided_by > 1 else ""
        return f"{self.name}: {_count(self.parameters)} in {self.tensors:,} tensors{scaled}"


@dataclass
class Report:
    machine: dict[str, Any]
    versions: dict[str, str]
    command: str
    began: str
    sets: list[Set] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    growth: list[Curve] = field(default_factory=list)
    absent: list[Absent] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = False

    def as_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"version": VERSION, **asdict(self)}
        for row, result in zip(data["results"], self.results, strict=True):
            row.update(roofline_ms=result.roofline_ms, percent_of_copy=result.percent_of_copy)
        return data

    def of(self, one: Set, dtype: str) -> list[Result]:
        return [r for r in self.results if (r.set, r.dtype) == (one.name, dtype)]

    @property
    def dtypes(self) -> list[str]:
        return list(dict.fromkeys(r.dtype for r in self.results))

    @property
    def our_failures(self) -> list[Result]:
        return [r for r in self.results if r.is_ours and r.failed]

    @property
    def largest_spread(self) -> Result | None:
        measured = [r for r in self.results if r.ms is not None]
        return max(measured, key=lambda r: r.ms.percent if r.ms else 0.0, default=None)


def _count(parameters: int) -> str:
    return f"{parameters / 1e6:.1f}M" if parameters >= 1e5 else f"{parameters:,}"
