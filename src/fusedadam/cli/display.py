"""Progress and tables: with rich on a terminal, as plain lines everywhere else."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence

Advance = Callable[[Sequence[float]], None]
Rows = Sequence[Sequence[str]]


def pretty() -> bool:
    return sys.stdout.isatty() and importlib.util.find_spec("rich") is not None


@contextlib.contextmanager
def progress(names: Sequence[str], steps: int) -> Iterator[Advance]:
    """Yields a function that is called once a step with the losses of all ``names``."""
    with _bars(names, steps) if pretty() else contextlib.nullcontext(_lines(names, steps)) as advance:
        yield advance


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
