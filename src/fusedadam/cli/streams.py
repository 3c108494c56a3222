"""Standard streams that are closed (`>&-`), full (`> /dev/full`) or no longer read (`| head`).

Commands write to them as if nothing could go wrong; what goes wrong is handled here, once for all commands.
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

    Python sets a stream that was closed to None; here it is the null device instead. They are opened in the order of
    their file descriptors, so that each gets its own number back, and no pipe to another process gets it.
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
            _flush()  # now, since python reports what fails later in words of its own
        except OSError as error:
            if not any(_fails(stream, text) for text in ("", "\n") for stream in (sys.stdout, sys.stderr)):
                raise  # it was about something else
            if not isinstance(error, BrokenPipeError):  # a reader that stops reading, such as `head`, is no problem
                tell(f"{program()}: cannot write to standard output: {error.strerror}")
            sys.exit(WRONG)


def tell(sentence: str) -> None:
    """Prints to standard error, if there is one that can be written to."""
    if sys.stderr is None:  # to print(), that would mean standard output
        return
    try:
        print(sentence, file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _fails(stream: TextIO, text: str) -> bool:
    """Whether this cannot be written to it, in which case it is silenced.

    An error does not tell which file it is about. What failed is still in the stream's buffer and fails again, so no
    text is needed, unless python runs unbuffered (`python -u`).
    """
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        _silence(stream)
        return True
    return False


def _silence(stream: TextIO) -> None:
    """What is still in its buffer goes nowhere: python would try to write it, and complain, when it exits."""
    with contextlib.suppress(io.UnsupportedOperation):  # no file behind it, as in a notebook
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
