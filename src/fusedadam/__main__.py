"""The command line, `python -m fusedadam <command>`: each command is a module in cli/ with `main(arguments) -> int`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "demo": "train a small transformer with these optimizers and with their peers, side by side",
    "run": "run a script written for Ascend (torch_npu, MindSpeed), unmodified, on a GPU or the CPU",
}
INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given and given[0] in COMMANDS:
        # only now, so that no command waits for the imports of another; everything else is the command's own
        command = importlib.import_module(f"fusedadam.cli.{given[0]}")
        try:
            code: int = command.main(given[1:])
        except KeyboardInterrupt:
            if given[0] == "run":  # the script's own, which python reports in its own way
                raise
            print("\nStopped.", file=sys.stderr)
            return INTERRUPTED
        return code
    parser = argparse.ArgumentParser(
        prog="python -m fusedadam",
        description="Fused optimizers of the Adam family for PyTorch.",
        epilog="`python -m fusedadam <command> --help` shows a command's options.",
    )
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    parser.parse_args(given)
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
