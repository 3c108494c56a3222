"""Norms that a step measures on its way: of each parameter's gradient, update and weights.

They are three more sums in visits of the elements that the rule makes anyway, so they need no memory, and a rule that
visits each element once still does. Weights and states have the same bits as without them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from types import FunctionType

from fusedadam.rules.clipping import tensor_norm
from fusedadam.rules.lowering import Lowering

# what is measured, and the name of its report, which no variable of a rule can have
REPORTS = {"grad": "norms.grad", "update": "norms.update", "weight": "norms.weight"}


def with_norms(lowering: Lowering, body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """The straight-line code of a rule, with the norms as variables to be reported."""
    before = [_assign("before.param", ast.Name("param")), _assign("before.grad", ast.Name("grad"))]
    measured: dict[str, ast.expr] = {
        "grad": ast.Name("before.grad"),
        "update": ast.BinOp(ast.Name("param"), ast.Sub(), ast.Name("before.param")),
        "weight": ast.Name("param"),
    }
    return [*before, *body, *(line for what, value in measured.items() for line in _norm(lowering, what, value))]


def _norm(lowering: Lowering, what: str, value: ast.expr) -> Iterator[ast.stmt]:
    assert isinstance(tensor_norm, FunctionType)
    norm, _ = lowering.inline(tensor_norm, [value], f"{REPORTS[what]}.")
    yield from lowering.inlined
    lowering.inlined = []
    yield _assign(REPORTS[what], norm)


def _assign(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(name)], value)
