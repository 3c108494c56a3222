"""Ctrl-C while a command imports: torch takes seconds, and Python imports the package before the command's own code."""

from __future__ import annotations

import contextlib
import sys
from pathlib import PurePath
from typing import Any

INTERRUPTED = 130  # the exit code that a shell reports for Ctrl-C


def is_command() -> bool:
    """Whether this process is `python -m fusedadam`, or the installed script."""
    given = getattr(sys, "argv", None) or [""]
    if given[0] == "-m":  # until Python has found the module, for which it imports the package
        return sys.orig_argv[-len(given)].removeprefix("-m") == "fusedadam"
    return PurePath(given[0]).stem == "fusedadam"


def watch() -> None:
    """From now on, Ctrl-C ends the process with a word instead of a traceback."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _report


def end() -> None:
    """From now on, Ctrl-C is what it always is."""
    if sys.excepthook is _report:
        sys.excepthook = sys.__excepthook__


def _report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print("\nStopped.", file=sys.stderr, flush=True)
    sys.exit(INTERRUPTED)


if is_command():
    watch()
