"""A rule's scalars as a list of operations. What the lists compute: see engine/test_device_scalars.py."""

from __future__ import annotations

from fusedadam.rules.counts import Count
from fusedadam.rules.ops import cos, exp, log, power
from fusedadam.rules.scalar_program import ARGUMENT_PREFIX, COUNT, FUNCTIONS
from tests.rules.test_tracing import STEPS, defined
from tests.support import clip

NO_STRINGS = ()


def evaluated(program, step, options):
    """What the list computes, with Python's numbers."""
    values = {ARGUMENT_PREFIX + name: options[name] for name in program.arguments} | {COUNT: float(step)}
    values |= {own.name: own.base(options) ** Count(step) for own in program.powers}

    def value(operand):
        return values[operand] if isinstance(operand, str) else operand

    for name, op, operands in program.operations:
        values[name] = FUNCTIONS[op](*map(value, operands))
    return {name: float(value(operand)) for name, operand in program.results.items()}


def test_what_is_shared_is_computed_once():
    def shared(step, lr):
        twice = lr + lr
        return {"x": twice * twice}

    program = defined(shared).scalar_program(NO_STRINGS)
    assert [op for _, op, _ in program.operations] == ["add", "mul"]
    assert clip.scalar_program(NO_STRINGS).powers == ()
    assert clip.scalar_program(NO_STRINGS) is clip.scalar_program(NO_STRINGS)


def test_a_computed_base_may_use_any_op():
    """The host computes it: neither its operations nor its arguments are part of the list."""
    made = defined(lambda step, beta: {"x": power(beta, 0.5) ** step})
    program = made.scalar_program(NO_STRINGS)
    (own,) = program.powers
    assert own.base({"beta": 0.25}) == 0.5
    assert own.reads == {"beta"}
    assert (program.operations, program.arguments) == ((), ())


def test_functions_of_functions_are_listed():
    """Each is a chain of a hundred operations, which recursion would not reach the end of."""
    made = defined(lambda step, lr: {"x": power(exp(log(power(step, 0.3)) * lr), cos(log(step)))})
    program = made.scalar_program(NO_STRINGS)
    for step in STEPS:
        assert evaluated(program, step, {"lr": 0.3})["x"] == float(made.scalars(step=step, lr=0.3)["x"])


def test_a_list_has_only_operations_that_ieee_rounds_correctly():
    """Others have another last bit with another processor or library."""
    exact = {"add", "sub", "mul", "neg", "pos", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "abs", "divide"}
    assert FUNCTIONS.keys() == exact | {"maximum", "minimum", "sqrt", "where"}
