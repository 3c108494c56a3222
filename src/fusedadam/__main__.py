"""The command line, `python -m fusedadam <command>`: each command is a module in cli/ with `main(arguments) -> int`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "demo": "train a small transformer with these optimizers and with their peers, side by side",
}
INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fusedadam",
        description="Fused optimizers of the Adam family for PyTorch.",
        epilog="`python -m fusedadam <command> --help` shows a command's options.",
    )
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)  # its own parser answers --help
    chosen, rest = parser.parse_known_args(arguments)
    if chosen.command is None:
        parser.print_help()
        return 0
    try:
        # only now, so that no command waits for the imports of another
        code: int = importlib.import_module(f"fusedadam.cli.{chosen.command}").main(rest)
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return INTERRUPTED
    return code


if __name__ == "__main__":
    sys.exit(main())
