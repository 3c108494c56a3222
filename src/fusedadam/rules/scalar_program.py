"""A rule's scalars as a list of operations in float64, for backends that compute them on a device with a kernel.

The list comes from calling the function with traced values (tracing.py), once for each choice of its options that are
strings. What could not be listed is refused when the rule is defined.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from fusedadam.rules import ops
from fusedadam.rules.tracing import ARGUMENT, ARITHMETIC, COMPARISONS, JOINS, Traced, made_from

Operand: TypeAlias = str | float  # the name of an earlier value, or a number
COUNT = "step"
ARGUMENT_PREFIX = "in_"

# What each operation is on numbers of the host: IEEE rounds each of them correctly, so that it does not matter where it
# runs.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in (*ARITHMETIC, *COMPARISONS, "neg", "pos")},
    **{name: getattr(operator, f"{name}_") for name in JOINS},
    **{name: getattr(ops, name) for name in ("abs", "divide", "maximum", "minimum", "sqrt", "where")},
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


def scalar_program(
    scalars: Callable[..., Mapping[str, Any]],
    arguments: Sequence[str],
    wanted: Sequence[str],
    strings: Mapping[str, str],
) -> ScalarProgram:
    """The operations that compute ``wanted``. ``strings``: the arguments that are strings."""
    traced = {name: Traced.argument(name) for name in (COUNT, *arguments)}
    found = scalars(**{**traced, **strings})
    writer = _Writer()
    for value in made_from((found[name] for name in wanted), whole=["pow"]):
        writer.add(value)
    results = {name: writer.operand(found[name]) for name in wanted}
    used = tuple(name for name in arguments if ARGUMENT_PREFIX + name in writer.used)
    return ScalarProgram(used, tuple(writer.powers), tuple(writer.operations), results)


class _Writer:
    def __init__(self) -> None:
        self.powers: list[StepPower] = []
        self.operations: list[Operation] = []
        self.names: dict[int, str] = {}  # by the traced value's id; all of them live as long as the results
        self.used: set[str] = set()

    def add(self, value: Traced) -> None:
        """Gives a value, whose operands have theirs, a name."""
        if value.op == ARGUMENT:
            (argument,) = value.operands
            name = COUNT if value.is_count else ARGUMENT_PREFIX + argument
        elif value.op == "pow":
            base = value.operands[0]
            reads = frozenset(own.operands[0] for own in made_from([base]) if own.op == ARGUMENT)
            name = f"power{len(self.powers)}"
            self.powers.append(StepPower(name, functools.partial(_on_host, base), reads))
        else:
            name = f"value{len(self.operations)}"
            self.operations.append(Operation(name, value.op, tuple(map(self.operand, value.operands))))
        self.names[id(value)] = name

    def operand(self, value: Any) -> Operand:
        """What stands for a value."""
        if not isinstance(value, Traced):
            return float(value)
        self.used.add(self.names[id(value)])
        return self.names[id(value)]


def _on_host(value: Any, options: Mapping[str, float]) -> float:
    """A value that follows from the hyper-parameters alone."""
    known: dict[int, Any] = {}

    def now(operand: Any) -> Any:
        return known[id(operand)] if isinstance(operand, Traced) else operand

    for own in made_from([value]):
        if own.op == ARGUMENT:
            known[id(own)] = options[own.operands[0]]
        else:
            known[id(own)] = FUNCTIONS[own.op](*map(now, own.operands))
    return float(now(value))
