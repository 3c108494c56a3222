"""Raises an exception at a chosen line of the package, as Ctrl-C or a lack of memory can at any line."""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import fusedadam

PACKAGE = str(Path(fusedadam.__file__).parent)
ERRORS = (KeyboardInterrupt, MemoryError)


class Interruption:
    """Raises ``error`` before the ``at``-th line of the package that is run inside; with ``at=None`` it only counts.

    ``finely`` counts bytecode instructions instead of lines: a signal may come between any two of them.
    """

    def __init__(self, at: int | None = None, error: type[BaseException] = KeyboardInterrupt, finely: bool = False):
        self.at, self.error, self.seen, self.where = at, error, 0, ""
        self.path: list[tuple[str, int]] = []  # all that was seen: a function, and the line or instruction in it
        self._event = "opcode" if finely else "line"

    def __enter__(self) -> Interruption:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = self._event == "opcode"
        return self._line

    def _line(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event != self._event or self.where or frame.f_lineno is None or _leaves_a_with_block(frame):
            return self._line  # instructions without a line prepare a function's variables: no signal is looked for
        if self.seen == self.at:
            self.where = f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_lineno} ({frame.f_code.co_name})"
            raise self.error("injected")
        self.seen += 1
        if self.at is None:
            self.path.append((str(frame.f_code), frame.f_lasti))
        return self._line


def _leaves_a_with_block(frame: FrameType) -> bool:
    """Whether ``__exit__`` is about to be called. Python looks for signals before and after that, but not in between:
    an exception here would leave gradients switched off, say, as no real one does."""
    if not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
        return False
    return frame.f_lasti > min(start for start, _, line in frame.f_code.co_lines() if line == frame.f_lineno)


def interrupted(function: Callable[[], Any], at: int, finely: bool = False) -> str:
    """Where ``function`` was interrupted, by one of the two errors; an empty string if it was over before."""
    error, modes = ERRORS[at % 2], torch_modes()
    with Interruption(at, error, finely) as interruption, contextlib.suppress(error):
        function()
        assert not interruption.where, f"the exception raised at {interruption.where} was swallowed"
    assert torch_modes() == modes, f"{interruption.where}: torch is left in another mode"
    return interruption.where


def torch_modes() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch._C._is_torch_function_enabled()


def points(function: Callable[[], Any], most: int | None = None, finely: bool = False) -> list[int]:
    """Where to interrupt ``function``: the first time that each line is reached; of these so many, evenly spread."""
    with Interruption(finely=finely) as counting:
        function()
    first = sorted({where: k for k, where in reversed(list(enumerate(counting.path)))}.values())
    return first if most is None else first[:: max(1, len(first) // most)]


def check_everywhere(check: Callable[[int], None], where: Iterable[int]) -> None:
    """Goes on after a failure, so that all lines that break the promise are named."""
    failures = []
    for at in where:
        try:
            check(at)
        except AssertionError as failure:
            failures.append(str(failure).split("\n")[0])
    assert not failures, "\n".join(failures)
