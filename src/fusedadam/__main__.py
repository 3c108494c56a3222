"""The command line, `fusedadam COMMAND`: each command is a module in cli/ with `main(arguments) -> int`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import fusedadam
from fusedadam.cli import streams
from fusedadam.cli.display import fold
from fusedadam.cli.frame import EXIT_CODES, FINE, INTERRUPTED, Folded, help_width, program

# What each does, and an example.
COMMANDS = {
    "doctor": ("check whether this machine is ready: devices, backends, threads, caches, known problems", "doctor"),
    "verify": ("prove on this machine that every optimizer computes what it should", "verify"),
    "bench": ("measure how fast a step is on this machine, every optimizer and its peers", "bench --quick"),
    "demo": ("train a small transformer with these optimizers and with their peers, side by side", "demo --steps 50"),
    "run": ("run a script written for Ascend (torch_npu, MindSpeed) unmodified, on a GPU or the CPU", "run train.py"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["run"]:  # its streams and interrupts belong to the script
        return _run("run", given[1:])
    try:
        with streams.checked():
            return _run(given[0], given[1:]) if given and given[0] in COMMANDS else _help(given)
    except KeyboardInterrupt:
        streams.tell("\nStopped.")
        return INTERRUPTED


def _run(name: str, arguments: list[str]) -> int:
    # imported only here, so that no command waits for the imports of another
    code: int = importlib.import_module(f"fusedadam.cli.{name}").main(arguments)
    return code


def _help(arguments: list[str]) -> int:
    parser = _parser()
    parser.parse_args(arguments)
    print(parser.format_help(), end="")  # print_help() would hide errors of a full disk
    return FINE


def _parser() -> argparse.ArgumentParser:
    folded = {name: fold(f"  {name:8} {summary}", " " * 9, help_width()) for name, (summary, _) in COMMANDS.items()}
    listed = "\n".join(f"{folded[name]}\n{' ' * 11}{program()} {example}" for name, (_, example) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog=program(),
        usage=f"{program()} [-h] [--version] COMMAND ...",
        description="Fused optimizers of the Adam family for PyTorch. New here? doctor, then verify, then demo.",
        epilog=f"commands, each with its own --help:\n{listed}\n\n{EXIT_CODES}",
        formatter_class=Folded,
    )
    parser.add_argument("--version", action="version", version=f"fusedadam {fusedadam.__version__}")
    parser.add_argument("COMMAND", nargs="?", choices=COMMANDS, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
