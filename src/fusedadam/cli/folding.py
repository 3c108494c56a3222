"""Text that fits the terminal: folded between words, never inside one. Piped output keeps its lines whole."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap

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
