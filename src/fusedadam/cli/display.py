"""Tables, and progress: as plain lines, and with a bar of rich on a terminal."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from typing import Any


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Names on the left, numbers aligned on the right."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "  ".join((first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others))).rstrip()

    return "\n".join(map(line, (headers, ["-" * width for width in widths], *rows)))


class Progress:
    """How far a command is: about ``lines`` lines, and a bar below them on a terminal."""

    def __init__(self, total: int, what: str, lines: int, bar: Any = None) -> None:
        self.total, self.what, self.lines, self.count, self.bar = total, what, lines, 0, bar
        self.task = bar and bar.add_task(f"{what} 0/{total}", total=total)

    def done(self, line: str = "", more: int = 1) -> None:
        before, self.count = self.count, self.count + more
        if before == 0 or self.count * self.lines // self.total > before * self.lines // self.total:
            counted = f"{self.count:{len(str(self.total))}} of {self.total} {self.what}".rstrip()
            self._print(f"[{counted}] {line}".rstrip())
        if self.bar:
            self.bar.update(self.task, advance=more, description=f"{self.what} {self.count}/{self.total}", refresh=True)

    def _print(self, line: str) -> None:
        if self.bar:
            self.bar.console.print(line, markup=False, highlight=False, overflow="ellipsis", no_wrap=True)
        elif self.lines:
            print(line, flush=True)


@contextlib.contextmanager
def progress(total: int, what: str = "", lines: int = 10) -> Iterator[Progress]:
    """Counts to ``total`` (``what``: of what); without ``lines`` nothing is shown."""
    if not lines or not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        yield Progress(total, what, lines)
        return
    import rich.progress

    # rich's own refreshing is a thread, which would take time from the steps that are measured
    with rich.progress.Progress(auto_refresh=False) as bar:
        yield Progress(total, what, lines, bar)
