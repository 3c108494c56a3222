"""Bfloat16 parameters whose states are bfloat16 as well: steps too small for them are lost, without any sign of it.

Warned of once, at the line that makes the optimizer. This package's own commands measure and verify such optimizers on
purpose, and are not warned.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

WITHIN = ("fusedadam.contract", "fusedadam.optimizers", "fusedadam.in_backward", "torch.", "contextlib", "functools")
_told: list[str] = []  # the optimizer that was warned of


def warn_of_bfloat16(optimizer: str, group: Mapping[str, Any], params: Iterable[Tensor]) -> None:
    if group.get("state_dtype") is not None or group.get("storage") is not None:
        return
    if any(param.dtype == torch.bfloat16 and param.requires_grad for param in params):
        module, level = _caller()
        if not module.startswith("fusedadam"):
            _warn_once(optimizer, level)


def _caller() -> tuple[str, int]:
    """The module that makes the optimizer, and the stack level of its frame in :func:`_warn_once`."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(WITHIN):
        frame, level = frame.f_back, level + 1
    return str(frame.f_globals.get("__name__")), level


def _warn_once(optimizer: str, level: int) -> None:
    if _told:
        return
    _told.append(optimizer)
    warnings.warn(
        f"fusedadam: {optimizer} keeps the states of bfloat16 parameters in bfloat16, so small steps are lost; pass "
        'state_dtype=torch.float32, or storage="exact", which also keeps the bits that the weights lack '
        "(docs/less-memory.md)",
        stacklevel=level,
    )
