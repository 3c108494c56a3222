"""The types of options that several commands have."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch


def device(text: str) -> torch.device:
    """One that is here and works."""
    try:
        found = torch.device(text)
        torch.empty(1, device=found).item()  # which a meta device cannot answer
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return found


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def whole(low: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number from ``low`` on."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from {low} on")
        return int(text)

    return parse
