"""The codecs of storage formats as source text: checked and rewritten like rules, for a backend to bind its ops to.

``formats/__init__.py`` says what a codec may contain. Names here begin with ``_``, which a rule's own names never do.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fusedadam.formats import FORMATS, Format, loses_bits
from fusedadam.formats.format import OPS
from fusedadam.formats.noise import HALF, mixed, multiplier, step_key
from fusedadam.formats.plain import round_to_odd
from fusedadam.rules.function import Function
from fusedadam.rules.lowering import Helpers, Lowering, call, define
from fusedadam.rules.stages import Stage

OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.BitAnd: "bit_and", ast.BitOr: "bit_or",
    ast.BitXor: "bit_xor", ast.LShift: "shift_left", ast.RShift: "shift_right",
}  # fmt: skip


class WithOperators(Lowering):
    """``a + b`` stays as it is, for compilers that keep 32-bit integers at 32 bits."""

    ops = OPS
    helper_prefix = "_"

    def constant(self, node: ast.expr, value: float) -> ast.expr:
        if not isinstance(value, int) or not -(1 << 31) <= value < 1 << 31:
            self.source.fail(node, f"`{ast.unparse(node)}`: a codec knows only signed 32-bit integers")
        return ast.Constant(value)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        operand = node.operand
        if isinstance(node.op, ast.USub) and isinstance(operand, ast.Constant) and isinstance(operand.value, int):
            return self.constant(node, -operand.value)
        self.source.fail(node, f"`{ast.unparse(node)}`: in a codec a minus stands before constants only")

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        if type(node.op) not in OPERATORS:
            self.source.fail(node, f"`{ast.unparse(node)}`: a codec has only + - * & | ^ << >>")
        return self.operation(node.op, self.visit(node.left), self.visit(node.right))

    def operation(self, operator: ast.operator, left: ast.expr, right: ast.expr) -> ast.expr:
        return ast.BinOp(left, operator, right)


class WithCalls(WithOperators):
    """``add(a, b)`` for ``a + b``, ``integer(1)`` for 1: Numba's own operators widen 32-bit integers to 64 bits."""

    def constant(self, node: ast.expr, value: float) -> ast.expr:
        return call("integer", super().constant(node, value))

    def operation(self, operator: ast.operator, left: ast.expr, right: ast.expr) -> ast.expr:
        return call(OPERATORS[type(operator)], left, right)


class StageFormats:
    """The formats of everything that a stage reads, writes or rounds as if it were stored, for one backend.

    ``roles``: all roles of the rule, in the order of its signature: each takes its own noise.
    """

    def __init__(
        self, stage: Stage, formats: Mapping[str, str], compute: str, backend: str, roles: Sequence[str] = ()
    ) -> None:
        self.compute, self.backend, self.roles = compute, backend, roles
        self.round_trips = [role for role in formats if f"_stored_{role}(" in stage.functions[-1]]
        names = dict.fromkeys((*stage.reads, *stage.row_values, *stage.column_values, *stage.writes, *self.round_trips))
        self.formats = {name: FORMATS[formats[name]] for name in names}
        self.by_block = any(fmt.by_block for fmt in self.formats.values())
        self.written_by_block = [name for name in stage.writes if self.formats[name].by_block]
        self.is_stochastic = any(self.formats[name].is_stochastic for name in stage.writes)
        self.stores_grad = stage.unscales and not loses_bits(formats["grad"], compute)  # if gradients are scaled

    @property
    def is_busy(self) -> bool:
        """Whether a kernel has so much to compute that it does not only wait for memory."""
        return self.by_block or self.is_stochastic

    def arrays(self, names: Iterable[str]) -> list[str]:
        """The arrays that these are kept in, which are fields of the table."""
        return [array for name in names for array in self.formats[name].array_names(name)]

    def noise_argument(self, name: str, constant: Callable[[int], str], times: Callable[[str, int], str]) -> str:
        """What encode, or measure, takes besides the value: nothing, noise, or the constant that rounds to nearest."""
        fmt = self.formats[name]
        if not fmt.takes_noise:
            return ""
        if not fmt.is_stochastic:
            return f", {constant(HALF)}"
        return f", {times('_hash', multiplier(name, self.roles))}"

    def with_round_trips(self, texts: list[str], native: Callable[[Format], str]) -> list[str]:
        """Adds ``_stored_ROLE(x)``: what comes back when x is stored and loaded. ``native``: the same, for formats that
        the hardware converts."""
        for role in self.round_trips:
            fmt = self.formats[role]
            words = ", ".join(f"_word_{name}" for name in fmt.array_names(role))
            lines = [f"{words} = _encode_{fmt.name}(x)", f"return _decode_{fmt.name}({words})"]
            if fmt.is_native(self.backend):
                lines = [f"return {native(fmt)}"]
            texts = [*texts, "\n    ".join([f"def _stored_{role}(x):", *lines])]
        return texts

    def codec_functions(self, lowering: type[Lowering], sole_format: Format | None = None) -> list[str]:
        """What a kernel with these formats calls: ``_decode_FORMAT`` and ``_encode_FORMAT`` of each that is not native,
        from and to the compute dtype, and ``_round_to_odd``. ``sole_format``: the format that all its inputs have."""
        formats = tuple(self.formats.values())
        return _codec_functions(formats, self.backend, self.compute, lowering, sole_format, self.is_stochastic)  # type: ignore[arg-type]

    def rounded(self, fmt: Format, x: str) -> str:
        """``x`` as the hardware is to convert it, which would round a float64 twice."""
        rounds_here = fmt.is_native(self.backend) and fmt.rounds and self.compute == "f64"
        return f"_round_to_odd({x})" if rounds_here else x


@functools.cache
def _codec_functions(
    formats: tuple[Format, ...], backend: str, compute: str, lowering: type[Lowering], sole_format: Format | None,
    is_stochastic: bool,
) -> list[str]:  # fmt: skip
    helpers: Helpers = {}
    lowered = functools.partial(_lowered, lowering, helpers)
    texts = []
    wide = compute == "f64"
    if any(fmt.rounds for fmt in formats) and wide:
        texts.append(lowered("_round_to_odd", round_to_odd))
    if is_stochastic:
        texts += [lowered("_step_key", step_key), lowered("_mixed", mixed)]
    for fmt in dict.fromkeys(formats):
        if fmt.is_native(backend):
            continue
        encode = fmt.encode_if_sole if fmt is sole_format and fmt.encode_if_sole else fmt.encode
        before = ("_round_to_odd" if fmt.rounds else "narrow") if wide else None
        texts.append(lowered(f"_decode_{fmt.name}", fmt.decode, after="widen" if wide else None))
        if fmt.by_block:
            texts.append(lowered(f"_measure_{fmt.name}", fmt.measure, before=before))
            texts.append(lowered(f"_of_block_{fmt.name}", fmt.of_block))
        texts.append(lowered(f"_encode_{fmt.name}", encode, before=None if fmt.by_block else before))
    return [*(helper.text for helper in helpers.values()), *texts]


def _lowered(
    lowering: type[Lowering], helpers: Helpers, name: str, function: Callable[..., Any] | None,
    before: str | None = None, after: str | None = None,
) -> str:  # fmt: skip
    """``before`` is called on the argument, ``after`` on the result."""
    assert function is not None
    source = Function(function, helper=True)
    lowered = lowering(source, {})
    lowered.helpers = helpers
    body, result = list(lowered.statements(source.body)), lowered.visit(source.result)
    if before:
        x = ast.Name(next(iter(source.kinds)))
        body.insert(0, ast.Assign([x], call(before, x)))
    return define(name, list(source.kinds), [*body, ast.Return(call(after, result) if after else result)])
