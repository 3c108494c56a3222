"""Progress and tables: with rich on a terminal, as plain lines everywhere else."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

Advance = Callable[[Sequence[float]], None]
Rows = Sequence[Sequence[str]]


def pretty() -> bool:
    return sys.stdout.isatty() and importlib.util.find_spec("rich") is not None


@contextlib.contextmanager
def progress(names: Sequence[str], steps: int) -> Iterator[Advance]:
    """Yields a function that is called once a step with the losses of all ``names``."""
    with _bars(names, steps) if pretty() else contextlib.nullcontext(_lines(names, steps)) as advance:
        yield advance


@contextlib.contextmanager
def counting(what: str, total: int, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Yields a function that is called with how many more are done: a bar, or about ten lines, or nothing."""
    if quiet:
        yield lambda more: None
    elif pretty():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns) as bar:
            task = bar.add_task(what, total=total)
            yield lambda more: bar.advance(task, more)
    else:
        done = 0

        def advance(more: int) -> None:
            nonlocal done
            before, done = done, done + more
            if done == total or 10 * done // total > 10 * before // total:
                print(f"{done:5} of {total} {what}", flush=True)

        yield advance


class Counter:
    """How far a command has come. ``doing`` says what is under way, ``done`` what is now behind it."""

    def doing(self, what: str) -> None:
        pass

    def done(self, line: str) -> None:
        raise NotImplementedError


@contextlib.contextmanager
def counter(total: int, file: TextIO | None = None) -> Iterator[Counter]:
    """A bar on a terminal, and one line for each of ``total`` things everywhere else."""
    file = file or sys.stdout
    if file.isatty() and importlib.util.find_spec("rich") is not None:
        with _CountingBar(total, file) as bar:
            yield bar
    else:
        yield _CountingLines(total, file)


def table(headers: Sequence[str], rows: Rows) -> None:
    (_rich_table if pretty() else _plain_table)(headers, rows)


@contextlib.contextmanager
def _bars(names: Sequence[str], steps: int) -> Iterator[Advance]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    # rich's own refreshing is a thread, which would take time from the steps that are being measured
    with Progress(*columns, auto_refresh=False) as bars:
        tasks = [bars.add_task(name, total=steps, loss="     -") for name in names]

        def advance(losses: Sequence[float]) -> None:
            for task, loss in zip(tasks, losses, strict=True):
                bars.update(task, advance=1, loss=f"{loss:6.3f}")
            bars.refresh()

        bars.refresh()
        yield advance


class _CountingLines(Counter):
    def __init__(self, total: int, file: TextIO) -> None:
        self.total, self.file, self.count = total, file, 0

    def done(self, line: str) -> None:
        self.count += 1
        print(f"[{self.count:{len(str(self.total))}} of {self.total}] {line}", file=self.file, flush=True)


class _CountingBar(Counter):
    EVERY = 0.2  # seconds, at least: what is being measured should not notice

    def __init__(self, total: int, file: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self.bar = Progress(*columns, auto_refresh=False, transient=True, console=Console(file=file, highlight=False))
        self.task = self.bar.add_task("", total=total)
        self.drawn = 0.0

    def doing(self, what: str) -> None:
        self.bar.update(self.task, description=what)
        if time.monotonic() - self.drawn > self.EVERY:
            self.bar.refresh()
            self.drawn = time.monotonic()

    def done(self, line: str) -> None:
        self.bar.console.print(line, markup=False, overflow="ellipsis", no_wrap=True)
        self.bar.advance(self.task)
        self.bar.refresh()

    def __enter__(self) -> _CountingBar:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


def _lines(names: Sequence[str], steps: int) -> Advance:
    """The first step, then about ten more lines, or one a step if there are fewer steps."""
    done, interval = 0, max(1, steps // 10)
    print("training loss of    " + "  ".join(names), flush=True)

    def advance(losses: Sequence[float]) -> None:
        nonlocal done
        done += 1
        if done in (1, steps) or done % interval == 0:
            cells = (f"{loss:{len(name)}.3f}" for name, loss in zip(names, losses, strict=True))
            print(f"step {done:5} of {steps:5}  " + "  ".join(cells), flush=True)

    return advance


def _rich_table(headers: Sequence[str], rows: Rows) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for k, header in enumerate(headers):
        table.add_column(header, justify="right" if k else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _plain_table(headers: Sequence[str], rows: Rows) -> None:
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    for row in (headers, ["-" * width for width in widths], *rows):
        name, *numbers = (
            cell.rjust(width) if k else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join((name, *numbers)).rstrip())
