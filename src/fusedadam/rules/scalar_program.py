"""A rule's scalars as a list of operations in float64, for backends that compute them on a device with a kernel.

The list comes from calling the function with traced values (tracing.py), once for each choice of its options that are
strings. Not every function becomes a list. With any of these, a rule stays with torch's operations, which also define
what a kernel computes:

- ``power(x, y)``: the only op whose bits differ between backends;
- a comparison as a number: as a scalar, or as an argument of an op other than ``where``;
- constants that are not numbers, such as arrays.

All of the optimizers here become lists but Adafactor, whose second moment decays by a power of the step.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from fusedadam.rules import ops
from fusedadam.rules.tracing import ARGUMENT, ARITHMETIC, COMPARISONS, JOINS, Traced

Operand: TypeAlias = str | float  # the name of an earlier value, or a number
COUNT = "step"
ARGUMENT_PREFIX = "in_"

# What each operation is on numbers of the host.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in (*ARITHMETIC, *COMPARISONS, "neg", "pos")},
    **{name: getattr(operator, f"{name}_") for name in JOINS},
    **{name: getattr(ops, name) for name in ("abs", "cos", "divide", "maximum", "minimum", "sqrt", "where")},
}


class Operation(NamedTuple):
    name: str  # of the result
    op: str  # in FUNCTIONS
    operands: tuple[Operand, ...]


class StepPower(NamedTuple):
    """``base ** step``. The host computes the base, since a table of its powers is made there."""

    name: str
    base: Callable[[Mapping[str, float]], float]  # of the hyper-parameters
    reads: frozenset[str]  # the hyper-parameters that the base depends on


@dataclass(frozen=True, eq=False)
class ScalarProgram:
    """``arguments``: the hyper-parameters that are read, each under its name with ARGUMENT_PREFIX. ``results``: what
    the function returns. The operations may also use COUNT, and the names of ``powers``."""

    arguments: tuple[str, ...]
    powers: tuple[StepPower, ...]
    operations: tuple[Operation, ...]
    results: Mapping[str, Operand]

    @property
    def is_exact(self) -> bool:
        """Whether every operation is rounded correctly, so that it does not matter where it runs."""
        return all(operation.op != "cos" for operation in self.operations)


class _NotAList(Exception):
    """The function does something that a list of operations cannot."""


def scalar_program(
    scalars: Callable[..., Mapping[str, Any]],
    arguments: Sequence[str],
    wanted: Sequence[str],
    strings: Mapping[str, str],
) -> ScalarProgram | None:
    """The operations that compute ``wanted``, or None: see above. ``strings``: the arguments that are strings."""
    traced = {name: Traced.argument(name) for name in (COUNT, *arguments)}
    found = scalars(**{**traced, **strings})
    writer = _Writer()
    try:
        results = {name: writer.number(found[name]) for name in wanted}
    except _NotAList:
        return None
    used = tuple(name for name in arguments if ARGUMENT_PREFIX + name in writer.used)
    return ScalarProgram(used, tuple(writer.powers), tuple(writer.operations), results)


class _Writer:
    def __init__(self) -> None:
        self.powers: list[StepPower] = []
        self.operations: list[Operation] = []
        self.used: set[str] = set()
        self._names: dict[int, str] = {}  # by the traced value's id; all of them live as long as the results

    def number(self, value: Any) -> Operand:
        """The operand that stands for a value, which is not a comparison."""
        if isinstance(value, Traced):
            if value.is_condition:
                raise _NotAList
            return self._name(value)
        if not isinstance(value, (int, float)):
            raise _NotAList
        return float(value)

    def _name(self, value: Traced) -> str:
        if id(value) not in self._names:
            self._names[id(value)] = self._written(value)
        return self._names[id(value)]

    def _written(self, value: Traced) -> str:
        if value.op == ARGUMENT:
            (argument,) = value.operands
            name = COUNT if value.is_count else ARGUMENT_PREFIX + argument
            self.used.add(name)
            return name
        if value.op == "pow":
            base = value.operands[0]
            of = functools.partial(_on_host, base)
            self.powers.append(StepPower(f"power{len(self.powers)}", lambda own: float(of(own)), _arguments(base)))
            return self.powers[-1].name
        if value.op not in FUNCTIONS:
            raise _NotAList
        operands = tuple(self._operands(value))
        self.operations.append(Operation(f"value{len(self.operations)}", value.op, operands))
        return self.operations[-1].name

    def _operands(self, value: Traced) -> list[Operand]:
        if value.op in JOINS:
            return [self._name(operand) for operand in value.operands]
        if value.op != "where":
            return [self.number(operand) for operand in value.operands]
        condition, a, b = value.operands
        if not (isinstance(condition, Traced) and condition.is_condition):
            raise _NotAList
        return [self._name(condition), self.number(a), self.number(b)]


def _arguments(value: Any) -> frozenset[str]:
    """The hyper-parameters that a value depends on."""
    if not isinstance(value, Traced):
        return frozenset()
    if value.op == ARGUMENT:
        return frozenset(value.operands)
    return frozenset().union(*map(_arguments, value.operands))


def _on_host(value: Any, options: Mapping[str, float]) -> Any:
    """A value that follows from the hyper-parameters alone."""
    if not isinstance(value, Traced):
        return value
    if value.op == ARGUMENT:
        return options[value.operands[0]]
    function = ops.power if value.op == "power" else FUNCTIONS[value.op]
    return function(*(_on_host(operand, options) for operand in value.operands))
