"""`fusedadam run SCRIPT`: runs a script written for Ascend on a GPU or the CPU.

The script sees what it would see under plain python: its own argv and `__main__`, its exit status, and tracebacks
without our frames.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import importlib.machinery
import io
import os
import runpy
import sys
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fusedadam import ascend, startup
from fusedadam.ascend import device as devices
from fusedadam.ascend.install import real_torch_npu
from fusedadam.cli import frame, streams

STDIN = "-"  # the script comes from standard input


def main(arguments: Sequence[str]) -> int:
    with streams.checked():
        options = _options(arguments)
    script, *rest = options.rest
    if not options.module and script != STDIN:
        with _opening(path := os.path.join(os.getcwd(), script)):
            os.stat(path)  # before anything is said about devices
    if real_torch_npu():
        _say(options, "torch_npu is installed, so nothing is replaced: the script runs as it is")
    else:
        try:
            ascend.install(options.device)
        except ValueError as error:
            sys.exit(f"{frame.program()} run: {error}")
        if options.device is not None:
            os.environ[devices.VARIABLE] = options.device
        _say(options, f'"npu" means {devices.kind()} here')
    sys.argv = [script, *rest]
    startup.end()
    _as_python_would(lambda: _run(script, options.module))
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = frame.parser(
        "run",
        "Runs a script written for Ascend's torch_npu or MindSpeed, unmodified, on a GPU or the CPU.",
        {
            "train.py --epochs 3": "like python train.py --epochs 3",
            "--device cpu -m mypackage.train": "on the CPU",
            "- < train.py": "a script from standard input",
        },
        "Everything after SCRIPT or MODULE is passed to it, and its exit code is that of the script.",
    )
    parser.usage = "%(prog)s [-h] [-q] [--device KIND] (SCRIPT | -m MODULE | -) [ARGUMENTS ...]"
    parser.add_argument(
        "--device", metavar="KIND", help='what "npu" means: cuda, cpu, ... (default: the best there is)'
    )
    parser.add_argument("-q", "--quiet", action="store_true", help='do not print what "npu" means')
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    own, after = _separated(arguments)
    options = parser.parse_args(own)
    options.rest += after
    if not options.rest:
        parser.error("a SCRIPT or -m MODULE is missing")
    return options


def _separated(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments as argparse needs them to do what python does, with `-mMODULE` in two; and those after our `--`,
    which are no options whatever they begin with."""
    own = list(arguments)
    for k, argument in enumerate(own):
        if argument == "--":
            return own[:k], own[k + 1 :]
        if argument.startswith("-m") and argument != "-m":  # -mMODULE
            return [*own[:k], "-m", argument[2:], *own[k + 1 :]], []
        is_value = k > 0 and own[k - 1] == "--device"
        if argument in ("-m", STDIN) or not (argument.startswith("-") or is_value):
            break
    return own, []


def _say(options: argparse.Namespace, sentence: str) -> None:
    if not options.quiet:
        streams.tell(f"fusedadam: {sentence}")


def _as_python_would(run: Callable[[], None]) -> None:
    """Errors go on to the interpreter, which prints them and exits as always, without our own frames."""
    try:
        run()
    except SystemExit:
        raise
    except BaseException as error:
        hook, frames = sys.excepthook, error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next

        def without_us(kind: type[BaseException], error: BaseException, _: Any) -> None:
            error.__traceback__ = frames
            hook(kind, error, frames)

        sys.excepthook = without_us
        raise


def _run(given: str, is_module: bool) -> None:
    main, path = _fresh_main(), os.path.join(os.getcwd(), given)
    if is_module:
        runpy._run_module_as_main(given)  # type: ignore[attr-defined]  # what python -m itself does
        return
    if given == STDIN:
        _put_first("")
        _execute(sys.stdin.buffer.read(), "<stdin>", main, importlib.machinery.BuiltinImporter)
        return
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        _put_first(path)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    with _opening(path), io.open_code(path) as file:
        source = file.read()
    _put_first(os.path.dirname(os.path.realpath(path)))
    _execute(source, path, main, importlib.machinery.SourceFileLoader("__main__", path))


def _execute(source: bytes, path: str, main: types.ModuleType, loader: Any) -> None:
    main.__dict__.update(__file__=path, __loader__=loader, __cached__=None)
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _fresh_main() -> types.ModuleType:
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):  # where a module has it from the beginning
        main.__annotations__ = {}
    return main


def _put_first(folder: str) -> None:
    """Replaces the folder that `python -m fusedadam` has put there."""
    if not getattr(sys.flags, "safe_path", False):  # python -P puts none there
        sys.path[0] = folder


@contextlib.contextmanager
def _opening(path: str) -> Iterator[None]:
    """Fails with the message of python itself."""
    try:
        yield
    except OSError as error:
        streams.tell(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}")
        sys.exit(frame.BAD_USAGE)  # as python does
