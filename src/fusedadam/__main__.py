"""The command line, `fusedadam <command>`: each command is a module in cli/ with `main(arguments) -> int`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import fusedadam
from fusedadam.cli.frame import EXIT_CODES, FINE, INTERRUPTED, WRONG, program

# What each is for, and a line to begin with.
COMMANDS = {
    "doctor": ("tell whether this machine is ready: devices, backends, threads, caches, known problems", "doctor"),
    "verify": ("prove on this machine that every optimizer computes what it should", "verify"),
    "bench": ("measure how fast a step is on this machine, every optimizer beside its peers", "bench --quick"),
    "demo": ("train a small transformer with these optimizers and with their peers, side by side", "demo --steps 50"),
    "run": ("run a script written for Ascend (torch_npu, MindSpeed) unmodified, on a GPU or the CPU", "run train.py"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given and given[0] in COMMANDS:
        return _run(given[0], given[1:])
    parser = _parser()
    parser.parse_args(given)
    parser.print_help()
    return FINE


def _run(name: str, arguments: list[str]) -> int:
    # imported only now, so that no command waits for the imports of another; everything else is the command's own
    command = importlib.import_module(f"fusedadam.cli.{name}")
    try:
        code: int = command.main(arguments)
        sys.stdout.flush()
    except (KeyboardInterrupt, BrokenPipeError) as error:
        if name == "run":  # the script's own, which python reports in its own way
            raise
        if isinstance(error, KeyboardInterrupt):
            print("\nStopped.", file=sys.stderr)
            return INTERRUPTED
        # whoever was reading has read enough, as `| head` does; python would complain once more when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return WRONG
    return code


def _parser() -> argparse.ArgumentParser:
    lines = (f"  {name:8} {summary}\n           {program()} {example}" for name, (summary, example) in COMMANDS.items())
    listed = "\n".join(lines)
    parser = argparse.ArgumentParser(
        prog=program(),
        usage=f"{program()} [-h] [--version] COMMAND ...",
        description="Fused optimizers of the Adam family for PyTorch. New here? doctor, then verify, then demo.",
        epilog=f"commands, each with an example and a --help of its own:\n{listed}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fusedadam {fusedadam.__version__}")
    parser.add_argument("COMMAND", nargs="?", choices=COMMANDS, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
