"""What was measured, as data (the JSON file) and in words (the terminal)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from fusedadam.cli import display
from fusedadam.cli.contestants import OURS, PRESETS, Absent, note
from fusedadam.cli.display import room, say
from fusedadam.cli.harness.measure import Measured, bytes_moved, copied_per_ms

VERSION = 3  # of the JSON file
BUSY = 20.0  # percent of spread that a quiet machine does not have
DISTURBED = "disturbed"  # in the place of a ratio


@dataclass(frozen=True)
class Spread:
    """A median and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        low, median, high = statistics.quantiles([*values, *values[: len(values) == 1]], n=4, method="inclusive")
        return cls(median, low, high)

    @property
    def percent(self) -> float:
        """Half the distance between the quartiles, in percent of the median."""
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
    against_ours: Spread | None = None  # its time over that of ``beside`` in the same turn; None for ours
    beside: str = OURS  # fusedadam-8bit, for a peer with low memory
    first_ms: float | None = None  # of the first step, with what it compiles
    note: str = ""  # how it rounds, which weights it has, where its states are
    bytes_moved: int | None = None
    copy_gb_s: float | None = None  # of large copies in the same turns, ours and its peers'
    state_bytes: int | None = None
    bytes_a_parameter: float | None = None  # of weights and states
    roofline_ms: float | None = None  # the time in which a large copy moves as many bytes
    percent_of_copy: float | None = None
    disturbed: bool = False  # by other programs, in too many turns: it has a time, and is compared with nothing

    @property
    def is_ours(self) -> bool:
        return self.is_reference or self.by in PRESETS

    @property
    def is_reference(self) -> bool:
        """Whether it is what the others are compared with: ours, without ``storage=``."""
        return self.by == OURS

    @property
    def label(self) -> str:
        return " ".join([self.optimizer, *filter(None, [PRESETS.get(self.by)])]) if self.is_ours else self.by


@dataclass(frozen=True)
class Set:
    """Parameters that are updated together."""

    name: str
    tensors: int
    parameters: int
    divided_by: int = 1  # its widths, to suit the machine

    @property
    def described(self) -> str:
        count = f"{self.parameters / 1e6:.1f}M" if self.parameters >= 1e5 else f"{self.parameters:,}"
        scaled = f", widths divided by {self.divided_by}" if self.divided_by > 1 else ""
        return f"{self.name}: {count} in {self.tensors:,} tensors{scaled}"


def results(optimizer: str, on: Set, dtype: str, measured: Mapping[str, Measured]) -> list[Result]:
    """Of ours and its peers on one set of parameters."""
    kind: torch.dtype = getattr(torch, dtype)
    copied = copied_per_ms(measured.values())
    found = []
    for by, own in measured.items():
        result = Result(optimizer, by, on.name, dtype, own.failed, note=note(optimizer, by))
        if not own.failed:
            ms, moved = Spread.of(own.ms), bytes_moved(own, measured[OURS])
            against = Spread.of(own.against_ours) if by != OURS and own.against_ours else None
            roofline = None if moved is None or copied is None else moved / copied
            percent = None if roofline is None or own.disturbed else 100 * roofline / ms.median
            result = replace(
                result, ms=ms, turns=len(own.ms), against_ours=against, bytes_moved=moved,
                copy_gb_s=None if copied is None else copied / 1e6, state_bytes=own.kept_bytes,
                bytes_a_parameter=kind.itemsize + own.kept_bytes / on.parameters,
                beside=own.beside or OURS, first_ms=own.first_ms,
                roofline_ms=roofline, percent_of_copy=percent, disturbed=own.disturbed,
            )  # fmt: skip
        found.append(result)
    return found


@dataclass
class Report:
    machine: dict[str, Any]
    versions: dict[str, str]
    command: str
    began: str
    sets: list[Set] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    absent: list[Absent] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # for which --quick had no time
    seconds: float = 0.0
    complete: bool = False

    def as_json(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}

    def panels(self) -> dict[str, list[Result]]:
        """The results of each set and dtype, by title."""
        found: dict[str, list[Result]] = {}
        described = {one.name: one.described for one in self.sets}
        for result in self.results:
            found.setdefault(f"{described[result.set]}, {result.dtype}", []).append(result)
        return found

    @property
    def our_failures(self) -> list[Result]:
        return [r for r in self.results if r.is_ours and r.failed]

    def notes(self) -> Iterator[str]:
        """What to know before reading the figures."""
        if self.left_out:
            left_out = ", ".join(self.left_out)
            yield f"No time was left for {left_out}. Name an optimizer (--optimizers), or leave out --quick."
        for text in dict.fromkeys(r.note for r in self.results if r.note):
            yield f"{', '.join(dict.fromkeys(r.by for r in self.results if r.note == text))}: {text}"
        for why in dict.fromkeys(one.why for one in self.absent):
            yield f"{', '.join(dict.fromkeys(one.by for one in self.absent if one.why == why))}: {why}"
        if any(r.beside != OURS for r in self.results):
            yield "x 8bit: against fusedadam-8bit, since both keep less than float32."
        worst = max((r.ms.percent for r in self.results if r.ms is not None), default=0.0)
        yield f"Times are medians; ± is half the distance between the quartiles of the turns, at most {worst:.0f} %."
        if any((result.percent_of_copy or 0.0) > 100 for result in self.results):
            yield "Above 100 % of copy: parameters that fit into a cache can be faster than a large copy."
        if any(r.disturbed for r in self.results):
            yield (
                "disturbed: in most turns other programs kept ours, or this peer, waiting for a core or for the "
                "device. A ratio would say nothing: stop the other programs and measure again."
            )
        elif worst > BUSY:
            yield "Times varied widely, though not because cores were taken: measure again before you trust a ratio."


def line(found: Sequence[Result]) -> str:
    """One optimizer and its peers, as soon as they are measured."""
    ours, *others = found
    shown = ", ".join([f"ours {_ms(ours)}", *(f"{other.by} {_against(other) or _ms(other)}" for other in others)])
    return f"{ours.optimizer} on {ours.set}, {ours.dtype}: {shown}"


def show(report: Report) -> None:
    for title, rows in report.panels().items():
        say(f"\n{title}")
        print(_table(rows, room()))
    for result in report.results:
        if result.failed:
            say(f"failed: {result.optimizer} by {result.by} on {result.set}, {result.dtype}: {result.failed}", "  ")
    say("\n".join(("", *report.notes())), "  ")


def _table(rows: Sequence[Result], width: int | None) -> str:
    """Optimizers have a column of their own, if there is room, else a line above their implementations."""
    headers, longest = ("optimizer", *COLUMNS), max(9, *(len(r.optimizer) for r in rows))
    cells = {id(r): [cell(r) for cell in COLUMNS.values()] for r in rows}
    beside = [[f"{r.optimizer if r.is_reference else '':{longest}} {r.by}", *cells[id(r)]] for r in rows]
    made = display.table(headers, beside)
    if width is None or len(made.partition("\n")[0]) <= width:
        return made
    empty = [""] * len(COLUMNS)
    above = [row for r in rows for row in ([[r.optimizer, *empty]] * r.is_reference + [[f"  {r.by}", *cells[id(r)]]])]
    return display.table(headers, above, width)


def ratio(value: float) -> str:
    """With three digits."""
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}"


def number(value: float) -> str:
    """Milliseconds with three or four digits."""
    digits = 4 if value < 0.1 else 3 if value < 10 else 1 if value < 1000 else 0
    return f"{value:.{digits}f}"


def _ms(r: Result) -> str:
    return "failed" if r.ms is None else f"{number(r.ms.median)} ms"


def _against(r: Result) -> str:
    if r.disturbed and not r.is_reference:
        return DISTURBED
    which = "" if r.beside == OURS else f" {PRESETS[r.beside]}"
    return "" if r.against_ours is None else f"{ratio(r.against_ours.median)} x{which}"


COLUMNS: dict[str, Callable[[Result], str]] = {
    "ms": lambda r: "failed" if r.ms is None else number(r.ms.median),
    "spread": lambda r: "" if r.ms is None else f"± {r.ms.percent:.0f} %",
    "first ms": lambda r: "" if r.first_ms is None else number(r.first_ms),
    "GB moved": lambda r: "" if r.bytes_moved is None else f"{r.bytes_moved / 1e9:.3f}",
    "of copy": lambda r: "" if r.percent_of_copy is None else f"{r.percent_of_copy:.0f} %",
    "state MB": lambda r: "" if r.state_bytes is None else f"{r.state_bytes / 1e6:.1f}",
    "bytes a parameter": lambda r: "" if r.bytes_a_parameter is None else f"{r.bytes_a_parameter:.2f}",
    "times fusedadam's time": _against,
}
