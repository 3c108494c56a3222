"""Tables and progress: with rich on a terminal, as plain lines everywhere else."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

EVERY = 0.2  # seconds between two refreshes, so that drawing does not disturb what is measured


def pretty() -> bool:
    return sys.stdout.isatty() and importlib.util.find_spec("rich") is not None


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table: names on the left, numbers aligned on the right."""
    if not pretty():
        print(plain(headers, rows))
        return
    from rich.console import Console
    from rich.table import Table

    made = Table()
    for k, header in enumerate(headers):
        made.add_column(header, justify="right" if k else "left")
    for row in rows:
        made.add_row(*row)
    Console().print(made)


def plain(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "  ".join((first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others))).rstrip()

    return "\n".join(map(line, (headers, ["-" * width for width in widths], *rows)))


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first, *others = ("| " + " | ".join(cells) + " |" for cells in (headers, *rows))
    return "\n".join((first, "|" + "---|" * len(headers), *others))


class Progress:
    """How far a command is: lines everywhere, and a bar below them on a terminal."""

    def __init__(self, total: int, what: str, lines: int) -> None:
        self.total, self.what, self.lines, self.count = total, what, lines, 0

    def doing(self, now: str) -> None:
        """What is under way; shown on a terminal only."""

    def done(self, line: str = "", more: int = 1) -> None:
        before, self.count = self.count, self.count + more
        if before == 0 or self.count * self.lines // self.total > before * self.lines // self.total:
            self._print(f"[{self.count:{len(str(self.total))}} of {self.total}{self.what}] {line}".rstrip())

    def _print(self, line: str) -> None:
        print(line, flush=True)


class _Quiet(Progress):
    def _print(self, line: str) -> None:
        pass


class _Bar(Progress):
    def __init__(self, bar: Any, total: int, what: str, lines: int) -> None:
        super().__init__(total, what, lines)
        self.bar, self.task, self.drawn = bar, bar.add_task("", total=total, what=what.strip()), 0.0
        self.bar.refresh()

    def doing(self, now: str) -> None:
        self.bar.update(self.task, description=now)
        if time.monotonic() - self.drawn > EVERY:
            self.bar.refresh()
            self.drawn = time.monotonic()

    def done(self, line: str = "", more: int = 1) -> None:
        super().done(line, more)
        self.bar.advance(self.task, more)
        self.bar.refresh()

    def _print(self, line: str) -> None:
        self.bar.console.print(line, markup=False, highlight=False, overflow="ellipsis", no_wrap=True)


@contextlib.contextmanager
def progress(total: int, what: str = "", lines: int = 10, quiet: bool = False) -> Iterator[Progress]:
    """Counts to ``total`` (``what``: of what) and prints about ``lines`` lines on the way."""
    what = f" {what}" if what else ""
    if quiet or not pretty():
        yield (_Quiet if quiet else Progress)(total, what, lines)
        return
    import rich.progress as rich

    columns = (
        rich.TextColumn("{task.fields[what]}"), rich.BarColumn(24), rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(), rich.TextColumn("{task.description}"),
    )  # fmt: skip
    # rich's own refreshing is a thread, which would take time from the steps that are measured
    with rich.Progress(*columns, auto_refresh=False) as bar:
        yield _Bar(bar, total, what, lines)
