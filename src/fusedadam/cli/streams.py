"""Standard streams that are closed (`>&-`), full (`> /dev/full`) or no longer read (`| head`).

Commands write without checks; errors are handled here, once for all commands.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from fusedadam.cli.frame import WRONG, program

MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """In this block each standard stream exists, and one that cannot be written to ends the program with code 1.

    Python sets a closed stream to None; here it is the null device instead. They are opened in the order of their file
    descriptors, so that each gets its own number back, and no pipe to another process gets it.
    """
    with contextlib.ExitStack() as opened:
        for name, mode in MODES.items():
            if getattr(sys, name) is None:
                opened.callback(setattr, sys, name, None)
                setattr(sys, name, opened.enter_context(open(os.devnull, mode, encoding="utf-8")))
        try:
            try:
                yield
            except SystemExit:  # from argparse, which has printed help or a usage error
                _flush()
                raise
            _flush()  # now, because errors at exit are reported by python itself
        except OSError as error:
            if not any(_fails(stream, text) for text in ("", "\n") for stream in (sys.stdout, sys.stderr)):
                raise  # the error is about another file
            if not isinstance(error, BrokenPipeError):  # a reader that stops early, such as `head`, is fine
                tell(f"{program()}: cannot write to standard output: {error.strerror}")
            sys.exit(WRONG)


def tell(sentence: str) -> None:
    """Prints to standard error, if it can be written to."""
    if sys.stderr is None:  # print() would take None for standard output
        return
    try:
        print(sentence, file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _fails(stream: TextIO, text: str) -> bool:
    """Whether writing fails; then the stream is silenced.

    An OSError does not say which file it is about. Text that failed is still in the stream's buffer and fails again,
    so that no text is needed, unless python runs unbuffered (`python -u`).
    """
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        _silence(stream)
        return True
    return False


def _silence(stream: TextIO) -> None:
    """Discards what is in its buffer: python would try to write it at exit, and complain."""
    with contextlib.suppress(io.UnsupportedOperation):  # it has no file, as in a notebook
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
