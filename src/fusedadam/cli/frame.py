"""What all commands share: exit codes, parsers with examples, types of options, and JSON output."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, NoReturn

import torch

from fusedadam import startup
from fusedadam.cli.display import fold, room
from fusedadam.machine import processor

FINE, WRONG, BAD_USAGE, INTERRUPTED = 0, 1, 2, startup.INTERRUPTED
WIDEST = 100  # of help: longer lines are hard to read
EXIT_CODES = "exit codes:\n  0 fine, 1 found something wrong or failed, 2 bad usage, 130 interrupted (Ctrl-C)"


def program() -> str:
    """What the user typed to get here: the installed script or the module."""
    return "fusedadam" if PurePath(sys.argv[0]).stem == "fusedadam" else "python -m fusedadam"


def help_width() -> int:
    return min(WIDEST, room() or WIDEST)


def parser(command: str, description: str, examples: Mapping[str, str], epilog: str = EXIT_CODES) -> Parser:
    """The parser of one command; ``examples``: arguments to copy, and what each line does."""
    commands = {f"  {program()} {command} {given}".rstrip(): why for given, why in examples.items()}
    longest = max(map(len, commands))
    if longest + 4 + max(map(len, commands.values())) <= help_width():
        listed = [f"{given:{longest}}  # {why}" for given, why in commands.items()]
    else:
        listed = [f"{fold(given, '    ', help_width())}\n    # {why}" for given, why in commands.items()]
    return Parser(
        prog=f"{program()} {command}",
        usage=f"{program()} {command} [OPTIONS]",
        description=description,
        epilog="\n".join(["examples:", *listed, "", epilog]),
        formatter_class=Folded,
    )


class Folded(argparse.RawDescriptionHelpFormatter):
    """Help that is folded between words: argparse takes the hyphen of torch-fused for the end of one."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=24, width=help_width())

    def _format_usage(self, *given: Any) -> str:
        return fold(super()._format_usage(*given), "  ", help_width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return fold(text, "", width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)


class Parser(argparse.ArgumentParser):
    """With the options that several commands have."""

    def add_device(self, **how: Any) -> None:
        self.add_argument("--device", type=device, **{"help": "default: cuda if available, else cpu", **how})

    def add_json(self) -> None:
        self.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")

    def error(self, message: str) -> NoReturn:
        super().error(fold(message, "  ") if sys.stderr.isatty() else message)


def device(text: str) -> torch.device:
    """The type of --device: a device that exists and works."""
    try:
        found = torch.device(text)
        torch.empty(1, device=found).item()  # a meta device has no values
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return found


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def devices() -> list[torch.device]:
    """All of this machine."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    others = [] if kind is None else [torch.device(kind.type, k) for k in range(torch.accelerator.device_count())]
    return [torch.device("cpu"), *others]


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return processor()
    properties: Any = getattr(getattr(torch, device.type, None), "get_device_properties", lambda _: None)(device)
    return str(getattr(properties, "name", device.type))


def whole(low: int, why: str = "") -> Callable[[str], int]:
    """The type of an option that is a whole number, at least ``low``."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from {low} on{why}")
        return int(text)

    return parse


def text_on_stderr(json: bool) -> contextlib.AbstractContextManager[Any]:
    """With --json, standard output has the JSON and nothing else."""
    return contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext()


def print_json(value: Mapping[str, Any]) -> None:
    print(json.dumps(value, indent=2))
