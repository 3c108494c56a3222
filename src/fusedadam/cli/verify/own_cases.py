"""Cases for an optimizer that this package does not know, from its class: its signature, its options, its rule.

Everything is given in parameter groups, since the arguments of its ``__init__`` may lack ``backend`` or ``storage``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusedadam.cli.optimizer_names import optimizer_class
from fusedadam.cli.verify.cases import BF16, F16, F32, MIXES, OF_ALL, Case
from fusedadam.cli.verify.judge_any import calls
from fusedadam.contract.base import FusedOptimizer
from fusedadam.contract.class_checks import options_read
from fusedadam.contract.storage import PRESETS
from fusedadam.rules.ops import power

Options: TypeAlias = tuple[tuple[str, Any], ...]
MOMENTUM = (0.0, 0.875)
LEARNING_RATE, WEIGHT_DECAY = 0.25, 0.0625  # the second group's: a factor, and what it has where the default is 0


@dataclass(frozen=True)
class OwnCase(Case):
    """``flags``: options and their values, where they are not the class's own."""

    @property
    def has_same_bits(self) -> bool:
        return not calls(optimizer_class(self.optimizer).rule.update, power)  # which may differ by an ulp

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.flags) if self.storage is None else {**dict(self.flags), "storage": self.storage}

    def make(self, params: Sequence[Tensor], backend: str) -> FusedOptimizer:
        cls = optimizer_class(self.optimizer)
        dtypes = {state.dtype_option: self.state for state in cls.states.values()} if self.storage is None else {}
        common = {**self.options, **dtypes, "backend": backend}
        second = _other_numbers(_defaults(self.optimizer), _read(self.optimizer))
        groups = [{"params": list(params[k::2]), **common, **own} for k, own in enumerate(({}, second))]
        made: Callable[..., FusedOptimizer] = cls
        return made(groups)


def own_cases(name: str, everything: bool) -> list[Case]:
    """Every value of every option, every dtype and preset; ``everything``: every combination of them."""
    values = _values(name)
    default = tuple((option, each[0]) for option, each in values.items())
    found: list[Case] = []
    if everything:
        allowed = [each for each in map(tuple, _combinations(values)) if _is_allowed(name, each)]
        mixed = [(own, mix) for own in allowed for mix in MIXES]
        stored = allowed
    else:
        several = _each_value_once(name, values)
        # dtypes that follow each other have the same options, and share kernels
        count = max(len(MIXES), len(several))
        mixed = [(several[k * len(several) // count], MIXES[k % len(MIXES)]) for k in range(count)]
        stored = [default]
    to_scale = True
    for own, (param, state) in mixed:
        scaled = to_scale and param == F16
        to_scale = to_scale and not scaled
        found.append(OwnCase(name, _changed(own, default), param, state, scaled))
    presets = itertools.product(stored, PRESETS)
    return found + [OwnCase(name, _changed(own, default), BF16, F32, storage=preset) for own, preset in presets]


def _combinations(values: Mapping[str, Sequence[Any]]) -> Iterator[Iterator[tuple[str, Any]]]:
    return (zip(values, each, strict=True) for each in itertools.product(*values.values()))


def _changed(own: Options, default: Options) -> Options:
    return tuple(option for option in own if option not in default)


def _each_value_once(name: str, values: Mapping[str, Sequence[Any]]) -> list[Options]:
    """As few combinations as have every value; options that exclude each other come one at a time."""
    count = max(map(len, values.values()), default=1)
    found: list[Options] = []
    for k in range(count):
        together = tuple((option, each[min(k, len(each) - 1)]) for option, each in values.items())
        if _is_allowed(name, together):
            found.append(together)
            continue
        default = {option: each[0] for option, each in values.items()}
        alone = [tuple({**default, option: value}.items()) for option, value in together]
        found += [each for each in alone if _is_allowed(name, each)]
    return list(dict.fromkeys(found))


@functools.cache
def _is_allowed(name: str, options: Options) -> bool:
    make: Callable[..., FusedOptimizer] = optimizer_class(name)
    try:
        make([{"params": [torch.nn.Parameter(torch.zeros(1))], **dict(options)}])
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


@functools.cache
def _defaults(name: str) -> dict[str, Any]:
    """The options of a group, as ``__init__`` has them."""
    make: Callable[..., FusedOptimizer] = optimizer_class(name)
    return dict(make([torch.nn.Parameter(torch.zeros(1))]).param_groups[0], params=None)


@functools.cache
def _read(name: str) -> frozenset[str]:
    """The options that the rule depends on."""
    return options_read(optimizer_class(name), _defaults(name))


def _values(name: str) -> dict[str, tuple[Any, ...]]:
    """The values of each option that chooses between formulas, the default first."""
    cls, defaults, read = optimizer_class(name), _defaults(name), _read(name)
    found: dict[str, tuple[Any, ...]] = {}
    for option in sorted(read):
        default = defaults.get(option)
        if option == "max_grad_norm":
            found[option] = (default, None if default else OF_ALL)
        elif option == "momentum" and "with_momentum" in cls._flags:
            found[option] = (default, *(value for value in MOMENTUM if bool(value) != bool(default)))
        elif isinstance(default, bool) or option == "maximize":
            found[option] = (bool(default), not default)
        elif isinstance(default, str):
            check = cls.options.get(option)
            allowed = check.keywords.get("allowed", ()) if isinstance(check, functools.partial) else ()
            found[option] = tuple(dict.fromkeys((default, *allowed)))
    return found


def _other_numbers(defaults: Mapping[str, Any], read: frozenset[str]) -> dict[str, Any]:
    """What the second group differs in: numbers only, so that it shares the first one's kernels."""
    other: dict[str, Any] = {}
    if "lr" in read:
        other["lr"] = float(defaults["lr"]) * LEARNING_RATE
    if "weight_decay" in read:
        other["weight_decay"] = float(defaults["weight_decay"]) * 2 or WEIGHT_DECAY
    return other
