"""The Triton kernel for scalars on the device, as source text: from the list of operations of a rule's scalars.

Every lane computes the scalars of one member. See ``fusedadam.engine.device_scalars`` for what is in which tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from fusedadam.codegen import indented
from fusedadam.engine.backend import ScalarLaunch
from fusedadam.engine.device_scalars import AT_F32, AT_F64, NUMBER
from fusedadam.engine.launch_table import STEP
from fusedadam.rules.counts import LAST, SHIFTS, SIZES
from fusedadam.rules.scalar_program import ARGUMENT_PREFIX, COUNT, Operand, ScalarProgram

SYMBOLS = {
    "add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
    "and": "&", "or": "|",
}  # fmt: skip
TYPES = {AT_F32: "tl.float32", AT_F64: "tl.float64"}


def source(launch: ScalarLaunch) -> str:
    """Where the host counts, all members have the same step, which is an argument. Numbers that are passed are
    arguments, too, as the bits of a float64."""
    is_hosted, scalars = launch.counts is None, launch.table.scalars
    counts = "step_number" if is_hosted else "counts"
    bits = [f"bits_{name}_{group}" for name, group in launch.passed]
    fixed = ["tensors", *([counts] if is_hosted else []), "count", *bits]
    signature = ["table", "numbers", "tensors", counts, "members", "count", "choices", "choice_numbers"]
    signature += [*(f"{name}: tl.int64" for name in bits), "BLOCK: tl.constexpr"]
    lines = [
        f"# scalars of {launch.table.specialized.rule.name}: {', '.join(scalars)}",
        "import triton",
        "import triton.language as tl",
        "from fusedadam.backends.triton.ops import abs, maximum, minimum, where",
        "from fusedadam.backends.triton.ops import divide64 as divide, number64 as number, sqrt64 as sqrt",
        "",
        "",
        f"@triton.jit(do_not_specialize={json.dumps(fixed)})",
        f"def run({', '.join(signature)}):",
        *indented(4, _body(launch, is_hosted)),
        "",
    ]
    return "\n".join(lines)


def _body(launch: ScalarLaunch, is_hosted: bool) -> Iterator[str]:
    program, fields = launch.program, launch.table.fields
    yield "_k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)"
    yield "_live = _k < count"
    yield "_column = tl.load(members + _k, mask=_live, other=0)"
    if not is_hosted:
        yield "_place = tl.load(members + count + _k, mask=_live, other=0)"
    yield "_words = tl.load(members + 2 * count + _k, mask=_live, other=0)"
    if is_hosted:
        yield f"{COUNT} = tl.zeros((BLOCK,), tl.float64) + step_number"
    else:  # in float32, as they are counted
        yield f"{COUNT} = (tl.load(counts + _place, mask=_live, other=0) + 1.0).to(tl.float64)"
    width = 2 * len(program.arguments) + len(program.powers)
    for k, name in enumerate(program.arguments):
        groups = [group for passed, group in launch.passed if passed == name]
        if groups:
            yield from _passed(name, groups, width)
        else:
            yield from _argument(ARGUMENT_PREFIX + name, k, len(program.arguments), launch.kinds[k])
    yield from _powers(program)
    for name, op, operands in program.operations:
        yield f"{name} = {_expression(op, [_text(operand) for operand in operands])}"
    for name in launch.table.scalars:
        yield f"tl.store(numbers + {fields[name]} * tensors + _column, {_text(program.results[name])}, mask=_live)"
    if STEP in fields:
        yield f"tl.store(table + {fields[STEP]} * tensors + _column, {COUNT}.to(tl.int64), mask=_live)"


def _argument(name: str, k: int, arguments: int, kinds: Sequence[int]) -> Iterator[str]:
    """A hyper-parameter of each member: a number, or read from a tensor; of several kinds if groups differ."""
    if NUMBER in kinds:
        yield f"{name} = tl.load(choice_numbers + _words + {k}, mask=_live, other=0)"
    if len(kinds) > 1:
        yield f"_kind = tl.load(choices + _words + {arguments + k}, mask=_live, other=0)"
    for kind in (kind for kind in kinds if kind != NUMBER):
        mask = "_live" if len(kinds) == 1 else f"_live & (_kind == {kind})"
        pointer = f"tl.load(choices + _words + {k}, mask=_live, other=0).to(tl.pointer_type({TYPES[kind]}))"
        loaded = f"tl.load({pointer}, mask={mask}, other=0).to(tl.float64)"
        yield f"{name} = {loaded}" if kind == kinds[0] else f"{name} = tl.where(_kind == {kind}, {loaded}, {name})"


def _passed(name: str, groups: Sequence[int], width: int) -> Iterator[str]:
    """A hyper-parameter of each member, by its group's place among the words."""
    numbers = [f"bits_{name}_{group}.to(tl.int64).to(tl.float64, bitcast=True)" for group in groups]
    yield f"{ARGUMENT_PREFIX}{name} = tl.zeros((BLOCK,), tl.float64) + {numbers[0]}"
    for group, number in zip(groups[1:], numbers[1:], strict=True):
        own = f"tl.where(_words == {width * group}, {number}, {ARGUMENT_PREFIX}{name})"
        yield f"{ARGUMENT_PREFIX}{name} = {own}"


def _powers(program: ScalarProgram) -> Iterator[str]:
    """The same products as in ``counts.py``, of one factor for each digit of the count."""
    if not program.powers:
        return
    yield f"_whole = tl.minimum({COUNT}, number({float(LAST)})).to(tl.int64)"
    begin = 0
    for digit, (shift, size) in enumerate(zip(SHIFTS, SIZES, strict=True)):
        yield f"_digit{digit} = {begin} + (_whole >> {shift} & {size - 1})"
        begin += size
    for k, power in enumerate(program.powers):
        table = f"choices + _words + {2 * len(program.arguments) + k}"
        yield f"_factors = choice_numbers + tl.load({table}, mask=_live, other=0)"
        a, b, c, d = (f"tl.load(_factors + _digit{digit}, mask=_live, other=0)" for digit in range(len(SHIFTS)))
        yield f"{power.name} = ({a} * {b}) * ({c} * {d})"


def _expression(op: str, operands: Sequence[str]) -> str:
    if op in SYMBOLS:
        return f" {SYMBOLS[op]} ".join(operands)
    if op == "pos":
        return operands[0]
    if op == "neg":  # Triton's own is 0 - x, which has another sign if x is 0
        return f"{operands[0]} * number(-1.0)"
    return f"{op}({', '.join(operands)})"


def _text(operand: Operand) -> str:
    if isinstance(operand, str):
        return operand
    is_finite = abs(operand) < float("inf")
    return f"number({operand!r})" if is_finite else f'number(float("{operand!r}"))'
