"""What commands print: text that is folded between words to fit the terminal, tables, and progress.

Piped output keeps its lines whole. On a terminal, rich draws a bar, if it is installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

NARROWEST = 40  # names and paths need some room


def room() -> int | None:
    """How many columns there are: what COLUMNS says, else the terminal's; None where there is no terminal."""
    given = os.environ.get("COLUMNS", "")
    if not (given.isdecimal() and int(given) > 0) and not sys.stdout.isatty():
        return None
    return max(NARROWEST, shutil.get_terminal_size().columns)


def fold(text: str, indent: str = "", width: int | None = None) -> str:
    """Each line of a text, folded to ``width`` (default: the terminal's); ``indent``: how much deeper it continues."""
    wide = width or room()
    return text if wide is None else "\n".join(_folded(line, indent, wide) for line in text.split("\n"))


def _folded(line: str, indent: str, width: int) -> str:
    begins = line[: len(line) - len(line.lstrip(" "))]
    # a name such as torch-fused, or a path, is one word
    return textwrap.fill(line, width, subsequent_indent=begins + indent, break_long_words=False, break_on_hyphens=False)


def say(text: str = "", indent: str = "") -> None:
    """Prints a text, folded."""
    print(fold(text, indent), flush=True)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Names on the left, numbers aligned on the right.

    Where ``width`` is too small, headers are folded; if that is not enough, each name has a line of its own, above its
    numbers.
    """
    lines: list[str] = []
    for folded, stacked in ((False, False), (True, False), (True, True)):
        lines = _lines(headers, rows, folded, stacked)
        if width is None or max(map(len, lines)) <= width:
            break
    return "\n".join(lines)


def _lines(headers: Sequence[str], rows: Sequence[Sequence[str]], folded: bool, stacked: bool) -> list[str]:
    heads = [header.split() if folded else [header] for header in headers]
    widths = [max(map(len, (*head, *cells))) for head, *cells in zip(heads, *rows, strict=True)]
    if folded:  # into as few lines as the cells leave room for
        heads = [textwrap.wrap(header, width) for header, width in zip(headers, widths, strict=True)]
    height = max(map(len, heads))
    above = [[*[""] * (height - len(head)), *head] for head in heads]
    if stacked:
        widths[0] = 0
        above[0].sort(key=bool, reverse=True)  # a line of its own as well
    every = (*zip(*above, strict=True), ["-" * width for width in widths], *rows)
    return [line for cells in every for line in _row(cells, widths, stacked) if line]


def _row(cells: Sequence[str], widths: Sequence[int], stacked: bool) -> Iterator[str]:
    first, *others = cells
    if stacked:
        yield first
        first = ""
    numbers = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
    yield "  ".join((first.ljust(widths[0]), *numbers)).rstrip()


class Progress:
    """How far a command is: about ``lines`` lines, and a bar below them on a terminal."""

    def __init__(self, total: int, what: str, lines: int, bar: Any = None) -> None:
        self.total, self.what, self.lines, self.count, self.bar = total, what, lines, 0, bar
        self.task = bar and bar.add_task(f"{what} 0/{total}".strip(), total=total)

    def begin(self, doing: str) -> None:
        """Says what is under way: below the lines on a terminal, elsewhere only until there is a first line."""
        if self.bar:
            self.bar.update(self.task, description=f"{doing} ({self._counted('/')})", refresh=True)
        elif self.lines and not self.count:
            self._print(f"[{self._counted(' of ')}] {doing} ...")

    def done(self, line: str = "", more: int = 1) -> None:
        before, self.count = self.count, self.count + more
        if before == 0 or self.count * self.lines // self.total > before * self.lines // self.total:
            self._print(f"[{self._counted(' of ')}] {line}".rstrip())
        if self.bar:
            description = f"{self.what} {self.count}/{self.total}".strip()
            self.bar.update(self.task, advance=more, description=description, refresh=True)

    def _counted(self, of: str) -> str:
        return f"{self.count:{len(str(self.total))}}{of}{self.total} {self.what}".rstrip()

    def _print(self, line: str) -> None:
        text = fold(line, "    ")
        if self.bar:
            self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif self.lines:
            print(text, flush=True)


@contextlib.contextmanager
def progress(total: int, what: str = "", lines: int = 10, measuring: bool = True) -> Iterator[Progress]:
    """Counts to ``total`` (``what``: of what); without ``lines`` nothing is shown.

    rich refreshes the bar in a thread, which would take time from steps: not while they are measured.
    """
    if not lines or not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        yield Progress(total, what, lines)
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("{task.description}", markup=False), BarColumn(bar_width=None), TimeElapsedColumn()
    with Bar(*columns, auto_refresh=not measuring, expand=True) as bar:
        yield Progress(total, what, lines, bar)
