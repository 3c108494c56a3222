"""What the commands have in common: their names, help with examples, exit codes, and JSON for machines."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

FINE, WRONG, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130  # the last is what a shell reports for Ctrl-C
WIDTH = 100  # of descriptions
EXIT_CODES = "exit codes:\n  0 fine, 1 found something wrong or failed, 2 bad usage, 130 interrupted (Ctrl-C)"


def program() -> str:
    """What the user has typed to get here: the installed script or the module."""
    return "fusedadam" if PurePath(sys.argv[0]).stem == "fusedadam" else "python -m fusedadam"


def parser(command: str, description: str, examples: Mapping[str, str]) -> argparse.ArgumentParser:
    """For one command; ``examples``: arguments to copy, and what each line is for."""
    return argparse.ArgumentParser(
        prog=f"{program()} {command}",
        description=textwrap.fill(description, WIDTH),
        epilog=f"examples:\n{_listed(command, examples)}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _listed(command: str, examples: Mapping[str, str]) -> str:
    width = max(map(len, examples))
    return "\n".join(f"  {program()} {command} {given:{width}}  {why}" for given, why in examples.items())


def add_json(to: argparse.ArgumentParser) -> None:
    to.add_argument("--json", action="store_true", help="print one JSON object and nothing else, for machines")


def print_json(value: Mapping[str, Any]) -> None:
    print(json.dumps(value, indent=2))
