"""The cases of an optimizer follow from its class: its signature, its options, its rule.

Everything is given in parameter groups, since the arguments of its ``__init__`` may lack ``backend`` or ``storage``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusedadam.catalog import CATALOG
from fusedadam.cli.optimizer_names import optimizer_class
from fusedadam.cli.verify.judge import calls
from fusedadam.contract.base import FusedOptimizer
from fusedadam.contract.class_checks import options_read
from fusedadam.contract.storage import PRESETS
from fusedadam.formats import FORMAT_OF_DTYPE, names
from fusedadam.rules.ops import orthogonalized, power

Options: TypeAlias = tuple[tuple[str, Any], ...]
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
MIXES = ((F32, F32), (BF16, BF16), (F16, F16), (F64, F64), (BF16, F32), (F32, BF16))  # parameters, states
MOMENTUM = (0.0, 0.875)
CLIPPED = 200.0  # random gradients have a norm of about 300 in all
# Of the two groups. With the default, most updates are so small that rounding the parameter hides their errors.
LEARNING_RATES = (8.0, 2.0)  # times the default
WEIGHT_DECAY = 0.0625  # the second group's, where the default is 0


@dataclass(frozen=True)
class Case:
    optimizer: str
    changed: Options  # where they are not the class's own
    param: torch.dtype
    state: torch.dtype
    scaled: bool = False  # gradients are scaled, as by torch.amp.GradScaler
    storage: str | None = None  # a preset, with parameters in bfloat16

    @property
    def has_same_bits(self) -> bool:
        """Whether all backends must give the same bits: powers may differ by an ulp, products of matrices by more."""
        rule = optimizer_class(self.optimizer).rule
        functions = [function for function in (rule.opening, rule.update) if function is not None]
        return not any(calls(function, op) for function in functions for op in (power, orthogonalized))

    @property
    def is_judged(self) -> bool:
        """By the rule in float64. What is rounded stochastically is only compared, with the eager backend's bits."""
        return self.storage in (None, "exact")

    @property
    def mix(self) -> str:
        if self.storage is not None:
            return self.storage
        return FORMAT_OF_DTYPE[self.param] + ("" if self.state == self.param else f"/{FORMAT_OF_DTYPE[self.state]}")

    @property
    def title(self) -> str:
        said = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        states = f", states in {names([self.state])}" if self.storage is None else ""
        scaled = ", gradients scaled" if self.scaled else ""
        return f"{self.optimizer}({said}), parameters in {names([self.param])}{states}{scaled}"

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.changed) if self.storage is None else {**dict(self.changed), "storage": self.storage}

    def make(self, params: Sequence[Tensor], backend: str) -> FusedOptimizer:
        """With groups that differ in numbers only, and so share kernels."""
        cls = optimizer_class(self.optimizer)
        dtypes = {state.dtype_option: self.state for state in cls.states.values()} if self.storage is None else {}
        common, numbers = {**self.options, **dtypes, "backend": backend}, _numbers(self.optimizer, self.changed)
        groups = [{"params": list(params[k::2]), **common, **own} for k, own in enumerate(numbers)]
        made: Callable[..., FusedOptimizer] = cls
        return made(groups)


def cases_of(name: str, everything: bool) -> list[Case]:
    """Every value of every option, every dtype and preset; ``everything``: every combination of them."""
    values = _values(name)
    if everything:
        combinations = (tuple(zip(values, each, strict=True)) for each in itertools.product(*values.values()))
        several = stored = [each for each in combinations if _is_allowed(name, each)]
        mixed = [(own, mix) for own in several for mix in MIXES]
    else:
        several, stored = _each_value_once(name, values), [tuple((option, each[0]) for option, each in values.items())]
        # dtypes that follow each other have the same options, and share kernels
        count = max(len(MIXES), len(several))
        mixed = [(several[k * len(several) // count], MIXES[k % len(MIXES)]) for k in range(count)]
    scaled = next(k for k, (_, mix) in enumerate(mixed) if mix == (F16, F16))  # once is enough
    return [
        *(Case(name, _changed(name, own), *mix, scaled=k == scaled) for k, (own, mix) in enumerate(mixed)),
        *(Case(name, _changed(name, own), BF16, F32, storage=preset) for own in stored for preset in PRESETS),
    ]


def together(cases: Sequence[Case]) -> list[list[Case]]:
    """Groups of cases that share kernels, one task each: the longest first, so that no process ends much later."""
    shared: dict[Any, list[Case]] = {}
    for case in cases:
        shared.setdefault((case.optimizer, case.changed, case.storage is None), []).append(case)
    return sorted(shared.values(), key=lambda task: -len(task) * _visits(task[0].optimizer))


def _visits(name: str) -> int:
    """Of each element in a step, with all flags: kernels that sum compile much more slowly."""
    rule = optimizer_class(name).rule
    return len(rule.specialize(dict.fromkeys(rule.flags, True)).stages)


def _changed(name: str, own: Options) -> Options:
    defaults = _defaults(name)
    return tuple((option, value) for option, value in own if value != defaults.get(option))


def _each_value_once(name: str, values: Mapping[str, Sequence[Any]]) -> list[Options]:
    """As few combinations as have every value, the defaults first."""
    count = max(map(len, values.values()), default=1)
    default = {option: each[0] for option, each in values.items()}
    found: list[Options] = [tuple(default.items())]
    for k in range(1, count):
        left = [(option, _at(k, count, each)) for option, each in values.items()]
        while left:  # options that exclude each other
            together, taken = dict(default), []
            for option, value in left * 2:  # one may need another that follows it
                if _is_allowed(name, tuple({**together, option: value}.items())):
                    together[option] = value
                    taken.append(option)
            found.append(tuple(together.items()))
            left = [(option, value) for option, value in left if taken and option not in taken]
    return list(dict.fromkeys(found))


def _at(k: int, count: int, values: Sequence[Any]) -> Any:
    """The value of an option in the ``k``-th of ``count`` combinations. None comes last: it switches something off."""
    return values[max(0, k - count + len(values)) if values[-1] is None else min(k, len(values) - 1)]


@functools.cache
def _is_allowed(name: str, options: Options) -> bool:
    make: Callable[..., FusedOptimizer] = optimizer_class(name)
    try:
        make([{"params": [torch.nn.Parameter(torch.zeros(1, 1))], **dict(options)}])
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


@functools.cache
def _defaults(name: str) -> dict[str, Any]:
    """The options of a group, as ``__init__`` has them."""
    make: Callable[..., FusedOptimizer] = optimizer_class(name)
    return dict(make([torch.nn.Parameter(torch.zeros(1, 1))]).param_groups[0], params=None)


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
            found[option] = (default, None if default else CLIPPED)
        elif option == "momentum" and "with_momentum" in cls._flags:
            found[option] = (default, *(value for value in MOMENTUM if bool(value) != bool(default)))
        elif isinstance(default, bool) or option == "maximize":
            found[option] = (bool(default), not default)
        elif isinstance(default, str):
            check = cls.options.get(option)
            allowed = check.keywords.get("allowed", ()) if isinstance(check, functools.partial) else ()
            found[option] = tuple(dict.fromkeys((default, *allowed)))
    return {**found, **CATALOG[name].choices} if name in CATALOG else found


@functools.cache
def _numbers(name: str, changed: Options) -> list[dict[str, Any]]:
    """The numbers that two groups differ in: learning rate, weight decay, and what our own tests set besides."""
    defaults, read = _defaults(name), _read(name)
    tested = CATALOG[name].variants[""].items() if name in CATALOG else ()
    second = {option: x for option, x in tested if type(x) in (int, float) and option not in _values(name)}
    if not _is_allowed(name, (*changed, *second.items())):
        second = {}
    if "weight_decay" in read:
        second["weight_decay"] = float(defaults["weight_decay"]) * 2 or WEIGHT_DECAY
    groups: list[dict[str, Any]] = [{}, second]
    for own, factor in zip(groups, LEARNING_RATES, strict=True):
        lr = float(defaults["lr"]) * factor if "lr" in read else 0.0
        if "lr" in read and _is_allowed(name, (("lr", lr),)):
            own["lr"] = lr
    return groups
