"""Warnings of what is likely a mistake, once each: options that are misspelt in a group, bfloat16 states, storage=
with float16 weights, and storage= that saves nothing.

torch keeps every key of a group that it does not know, and so do we: schedulers and users store things of their own
there. A key that is nearly the name of an option is more likely a mistake.

Where both parameters and states are bfloat16, steps too small for them are lost, silently.

A warning names the user's line: mostly the one that makes the optimizer. This package's own commands measure and
verify such optimizers on purpose, and are not warned.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fusedadam.contract.declarations import Group
from fusedadam.contract.storage import SMALLEST
from fusedadam.tensors import host_memory

if TYPE_CHECKING:
    from fusedadam.contract.base import FusedOptimizer

# A longer name leaves less room for another word: "betas" and "meta", "wd_ratio" and "lr_ratio" differ by two letters.
SHORTEST, LONG = 5, 10


def warn_of_misspelt(optimizer: str, keys: Iterable[object], options: Iterable[str]) -> None:
    """Warns once for each key that has no effect and is close to the name of an option."""
    known = list(options)
    for key in keys:
        if isinstance(key, str) and key not in known:
            meant = next((option for option in known if _is_misspelt(key, option)), None)
            if meant is not None:
                _tell_once(
                    f"misspelt: {optimizer} {key}",
                    f"fusedadam: a group of {optimizer} has {key!r}, which is not an option and has no effect; did you "
                    f"mean {meant!r}?",
                )


def _is_misspelt(key: str, option: str) -> bool:
    if key.lower().replace("-", "_") == option:
        return True
    if len(option) < SHORTEST:
        return False
    if sorted(key) == sorted(option):  # letters in another order
        return True
    return _letters_off(key, option) <= (2 if len(option) >= LONG else 1)


def _letters_off(a: str, b: str) -> int:
    """How many letters are missing, extra or others."""
    changes = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in changes if kind != "equal")


def warn_of_bfloat16(optimizer: type[FusedOptimizer], group: Group) -> None:
    if "bfloat16" in _told or group.get("storage") is not None:
        return
    option = next((o for p in group["params"] if p.requires_grad for o in _undecided(optimizer, group, p)), None)
    if option is not None:
        _tell_once(
            "bfloat16",
            f"fusedadam: {optimizer.__name__} keeps the states of bfloat16 parameters in bfloat16, so small steps are "
            f'lost; pass {option}=torch.float32, or storage="exact", which also keeps the bits that the weights lack '
            '(in the documentation: "Less memory")',
        )


def _undecided(optimizer: type[FusedOptimizer], group: Group, param: Tensor) -> Iterator[str]:
    """The options with a dtype that nobody has chosen, of states that this parameter has in bfloat16."""
    if param.dtype != torch.bfloat16:
        return
    for name in optimizer.states if is_lazy(param) else optimizer.specialized(group, param).states:
        state = optimizer.states[name]
        if group.get(state.dtype_option) is None and state.dtype_of(param, group) == torch.bfloat16:
            yield state.dtype_option


def warn_of_offload(group: Group, param: Tensor) -> None:
    if group.get("offload") and param.device.type == "cpu" and "cpu" not in host_memory.DEVICES:
        _tell_once(
            "offload",
            "fusedadam: offload=True does nothing for parameters on the CPU, whose states are in host memory anyway; "
            "move the model to a GPU first, or leave offload out",
        )


MOVES = 3  # loading, copying and switching offload on move states once


def warn_of_moved_states(times: int) -> None:
    if times == MOVES:
        _tell_once(
            "moved",
            f"fusedadam: states of groups with offload=True were moved out of page-locked memory {MOVES} times, and "
            "each time the next step has copied them back; leave optimizer.state as it is, or leave offload out",
        )


def warn_of_float16(group: Group, params: Iterable[Tensor]) -> None:
    """``group``: that of the parameters, with a ``storage`` or without."""
    if group.get("storage") is not None and any(param.dtype == torch.float16 for param in params):
        _tell_once(
            "float16",
            "fusedadam: storage= keeps float16 weights as they are, without low-order bits, so small steps are lost; "
            "use bfloat16 weights (model.bfloat16())",
        )


def warn_of_wide(optimizer: FusedOptimizer) -> None:
    """If most of a model stays as wide as without ``storage=``. Parameters too small for 8 bits do not count: so small
    a model has nothing to save."""
    if "wide" in _told:
        return
    stored = [(g, p) for g in optimizer.param_groups if g.get("storage") for p in g["params"] if not is_lazy(p)]
    elements = sum(param.numel() for _, param in stored)
    wide: dict[str, int] = {}
    for group, param in stored:
        if param.numel() >= SMALLEST:
            chosen = optimizer.storage_of(group, param)
            if chosen.is_exact and chosen.reasons:
                why = [*chosen.reasons.values()][-1]
                wide[why] = wide.get(why, 0) + param.numel()
    if 2 * sum(wide.values()) > elements:
        share, why = sum(wide.values()) / elements, max(wide, key=wide.__getitem__)
        _tell_once(
            "wide",
            f"fusedadam: storage= saves little here: {type(optimizer).__name__} keeps {share:.0%} of the model exactly "
            f"({why}); print(optimizer.memory_summary()) lists what is kept how",
        )


# modules between the user's line and a warning
WITHIN = ("fusedadam.contract", "fusedadam.optimizers", "fusedadam.in_backward", "torch.", "contextlib", "functools")
_told: set[str] = set()


def _tell_once(what: str, text: str) -> None:
    """At the user's line."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(WITHIN):
        frame, level = frame.f_back, level + 1
    if what not in _told and not str(frame.f_globals.get("__name__")).startswith("fusedadam"):
        _told.add(what)
        warnings.warn(text, stacklevel=level)
