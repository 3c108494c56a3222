"""Commands as a user starts them: piped, in a terminal, or where packages are missing."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from fusedadam import __main__ as command_line

# One thread: with several, torch's wait for each other, and beside other busy programs that takes many times as long.
# The interpreter is for tests of kernels; a user has not set it.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "FUSEDADAM_DEVICE", "CC")}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "COLUMNS": "120", "TERM": "xterm"}
COMMAND = [sys.executable, "-m", "fusedadam"]

WITHOUT = """
import importlib.util, sys
blocked, find = {blocked!r}, importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in blocked else find(name, *rest)
for name in blocked:
    sys.modules[name] = None
from fusedadam.__main__ import main
sys.exit(main({arguments!r}))
"""

RULES = Path(__file__).parents[2] / "docs/rules.md"
THEIRS = "theirs:AdaBelief"  # in the package below


def make_package(folder: Path) -> None:
    """The optimizers of docs/rules.md in a package: ``theirs:AdaBelief``, and ``theirs:Lars``, which sums."""
    code = re.findall(r"```python\n(.*?)```", RULES.read_text("utf-8"), re.DOTALL)
    summing = next(block for block in code if "class Lars" in block).partition("\n\n\nparam = ")[0]
    (folder / "theirs").mkdir()
    (folder / "theirs/__init__.py").write_text("\n\n".join((code[0], summing)), encoding="utf-8")


def ran(*arguments: str) -> object:
    """The exit code of a command in this process."""
    try:
        return command_line.main(arguments)
    except SystemExit as ended:
        return ended.code


def piped(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**ENVIRONMENT, **variables}
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env=environment, timeout=600)


def without(blocked: Iterable[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    program = WITHOUT.format(blocked=tuple(blocked), arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT, timeout=900)


def heed_ctrl_c() -> None:
    """A shell starts what runs in the background deaf to it, and a test may well run there."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def in_terminal(
    command: list[str], interrupt_when: Callable[[str], object] | None = None, seconds: float = 600
) -> tuple[int, str]:
    """The exit code and all that was seen; Ctrl-C is pressed once what has been seen says so."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=ENVIRONMENT, start_new_session=True,
        preexec_fn=heed_ctrl_c,
    )  # fmt: skip
    os.close(theirs)
    seen, end = "", time.monotonic() + seconds
    try:
        while True:
            try:
                read = os.read(ours, 65536)
            except OSError:  # Linux's way to say that nobody has the terminal open any more
                break
            if not read:
                break
            seen += read.decode(errors="replace")
            if interrupt_when is not None and interrupt_when(seen):
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to everyone in the foreground
                interrupt_when = None
            assert time.monotonic() < end, seen
        return process.wait(timeout=600), seen
    finally:
        os.close(ours)
        if process.poll() is None:
            process.kill()
