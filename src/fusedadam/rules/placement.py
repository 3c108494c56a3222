"""Where each value of a rule is computed: its space (element, row, column or tensor) and its position.

A rule reads as if a sum were just another value, but a sum is known only when every element has been visited, and a
product of matrices in the round after. So each value is placed at the first position of its space at which everything
it needs is known. What is by row, column or tensor in an expression by element becomes a value of its own: it is
computed once, in float64. Names that are assigned more than once get a version for each assignment.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusedadam.rules.function import RESERVED
from fusedadam.rules.lowering import Lowering, WrittenCall
from fusedadam.rules.ops import FACTORED, SUMS, largest, row_sum
from fusedadam.rules.positions import START, Phase, Position

FINENESS = {"element": 2, "row": 1, "column": 1, "tensor": 0, None: -1}
SHARED = ("group", "all")  # sums over several parameters


@dataclass(frozen=True)
class Sum:
    """``name`` is the sum (or the largest) of ``term``, which is known at ``position``, over each row, tensor, ...

    A sum over a ``"matrix"``, the last two dimensions, is of terms by row, and each row of the matrix gets it.
    """

    name: str
    term: str
    of: str  # the term's space
    over: str
    position: Position
    largest: bool

    @property
    def space(self) -> str:
        """What there is a sum for."""
        return {"matrix": "row", "group": "tensor", "all": "tensor"}.get(self.over, self.over)


@dataclass(frozen=True)
class Product:
    """``name`` is what becomes of ``term``, by element, in a product of matrices. The visit at ``position`` stores the
    term in memory, where the product replaces it, for the visits of later rounds to read."""

    name: str
    term: str
    position: Position


@dataclass(frozen=True)
class Placed:
    """A value's place. Space None: it is made of scalars and numbers alone, and known anywhere."""

    space: str | None = None
    position: Position = START
    is_condition: bool = False


@dataclass(frozen=True, eq=False)
class Statement:
    targets: tuple[str, ...]
    value: ast.expr
    reads: tuple[str, ...]


@dataclass(frozen=True)
class Placement:
    """All values that are needed for what is stored and reported, in the order of the rule."""

    roles: Sequence[str]
    spaces: Mapping[str, str]  # of the roles
    is_factored: bool  # rows are indices of all dimensions but the last
    values: Mapping[str, Placed]
    statements: Sequence[Statement]
    computed_by: Mapping[str, Statement]  # of all values but roles, scalars, sums and products
    sums: Sequence[Sum]
    product: Product | None
    stored: Mapping[str, str]  # value -> the role that it is stored as
    reports: Mapping[str, str]  # name of the report -> value


def place(lowering: Lowering, body: Sequence[ast.stmt], stored: Sequence[str], reports: Sequence[str]) -> Placement:
    """``body``: straight-line code; ``stored``: the roles that it assigns and returns; ``reports``: values to keep."""
    placer = _Placer(lowering, body)
    for statement in body:
        assert isinstance(statement, ast.Assign)
        placer.assign(statement.targets[0], statement.value)
    final = {placer.current[role]: role for role in stored}
    for value, role in final.items():
        placer.check_fits(role, value)
    reported = {name: placer.current[name] for name in reports if name in placer.current}
    for name, value in reported.items():
        if placer.values[value].space != "tensor":
            lowering.source.refuse(f"`{name}` cannot be reported: it has not one value for each tensor")
    return _as_late_as_possible(placer.needed_for(final, reported))


def reachable(goals: Iterable[str], reads: Callable[[str], Iterable[str]]) -> set[str]:
    """The goals, what they read, what that reads, and so on."""
    found: set[str] = set()
    todo = list(goals)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += reads(name)
    return found


def calls(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


class _Placer:
    """Places the values of one statement after the other."""

    def __init__(self, lowering: Lowering, body: Sequence[ast.stmt]) -> None:
        kinds = lowering.source.kinds
        scalars, self.roles = ([n for n, k in kinds.items() if k == kind] for kind in ("Scalar", "Value"))
        self.source, self.spaces = lowering.source, lowering.source.spaces
        self.sum_calls, self.product_calls = lowering.sums, lowering.products
        used = {node.id for statement in body for node in ast.walk(statement) if isinstance(node, ast.Name)}
        self.is_factored = any(written.op in FACTORED for written in lowering.sums.values()) or any(
            space in ("row", "column") for role, space in self.spaces.items() if role in used
        )
        self.by_rows = self.is_factored or any(written.op is row_sum for written in lowering.sums.values())
        self.helpers = {helper.name: helper.is_condition for helper in lowering.helpers.values()}
        self.taken = RESERVED | {*self.helpers}
        self.values = {name: Placed() for name in scalars}
        self.values |= {name: Placed(self.spaces[name], START.first_in(self.spaces[name])) for name in self.roles}
        self.current: dict[str, str] = {}  # which version of a name is the present one
        self.statements: list[Statement] = []
        self.computed_by: dict[str, Statement] = {}
        self.sums: dict[str, Sum] = {}
        self.product: Product | None = None

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        names = [n.id for n in (target.elts if isinstance(target, ast.Tuple) else [target]) if isinstance(n, ast.Name)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            versions = [self.assign_one(name, *self.expression(v)) for name, v in zip(names, value.elts, strict=True)]
        elif len(names) == 1:
            versions = [self.assign_one(names[0], *self.expression(value))]
        else:  # a helper that returns several
            returned, placed = self.expression(value)
            versions = list(self.define(names, returned, placed))
            for version, is_condition in zip(versions, self.returned_by(value), strict=True):
                self.values[version] = replace(placed, is_condition=is_condition)
        self.current.update(zip(names, versions, strict=True))

    def assign_one(self, name: str, value: ast.expr, placed: Placed) -> str:
        if isinstance(value, ast.Name) and name not in self.roles:
            return value.id  # only another name for it
        return self.define([name], value, placed)[0]

    def define(self, names: Iterable[str], value: ast.expr, placed: Placed) -> tuple[str, ...]:
        targets = tuple(self.version(name) for name in names)
        reads = tuple(n.id for n in ast.walk(value) if isinstance(n, ast.Name) and n.id in self.values)
        statement = Statement(targets, value, reads)
        self.statements.append(statement)
        self.values |= dict.fromkeys(targets, placed)
        self.computed_by |= dict.fromkeys(targets, statement)
        return targets

    def version(self, name: str) -> str:
        name = name.rpartition(".")[2]  # without the scope of an inlined helper
        candidates = itertools.chain([name], (f"{name}_{k}" for k in itertools.count(1)))
        return next(v for v in candidates if v not in self.values and v not in self.taken)

    def expression(self, node: ast.expr) -> tuple[ast.expr, Placed]:
        if isinstance(node, ast.Name):
            name = self.current.get(node.id, node.id)
            return ast.Name(name), self.values[name]
        if isinstance(node, ast.Constant) or not _operands(node):  # a helper without arguments
            return node, Placed()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.sum_calls:
            return self.sum(node.func.id, self.sum_calls[node.func.id], *self.expression(node.args[0]))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.product_calls:
            return self.multiply(node.func.id, self.product_calls[node.func.id], *self.expression(node.args[0]))
        operands, places = zip(*map(self.expression, _operands(node)), strict=True)
        space = _joined(placed.space for placed in places)
        # what is by row, column or tensor in an expression by element is computed by itself, once, in float64
        named = [
            self.named(operand, placed) if placed.space not in (None, space) else operand
            for operand, placed in zip(operands, places, strict=True)
        ]
        position = max(placed.position for placed in places)
        position = position if space is None else position.first_in(space)
        return _with_operands(node, named), Placed(space, position, self.is_condition(node, places))

    def is_condition(self, node: ast.expr, operands: Sequence[Placed]) -> bool:
        if isinstance(node, ast.Compare) or self.returned_by(node) is True:
            return True
        chosen = operands[1:] if calls(node, "where") else operands  # where(condition, a, b) is what a and b are
        return (isinstance(node, ast.BinOp) or calls(node, "where")) and all(placed.is_condition for placed in chosen)

    def returned_by(self, node: ast.expr) -> Any:
        """Whether the helper that is called returns a condition; a tuple if it returns several values."""
        return next((kind for name, kind in self.helpers.items() if calls(node, name)), None)

    def named(self, value: ast.expr, placed: Placed) -> ast.Name:
        is_kept = isinstance(value, ast.Name) and not (value.id in self.roles and placed.space != "element")
        return value if is_kept else ast.Name(self.define(["value"], value, placed)[0])  # type: ignore[return-value]

    def check_fits(self, role: str, value: str) -> None:
        """Refuses to store a value by element in a state by row, and the like."""
        space, wanted = self.values[value].space, self.spaces[role]
        if _joined([space, wanted]) != wanted:
            self.source.refuse(
                f"the state `{role}` has one value for each {wanted}, and is assigned one for each {space}; "
                "sum it first"
            )

    def multiply(self, name: str, written: WrittenCall, term: ast.expr, placed: Placed) -> tuple[ast.expr, Placed]:
        code, fail = ast.unparse(written.node), written.source.fail
        if self.product is not None:
            fail(written.node, f"`{code}`: a rule has memory for one product of matrices; orthogonalize once")
        if placed.space != "element":
            has = "is a number" if placed.space is None else f"has one value for each {placed.space}"
            fail(written.node, f"`{code}`: it {has}; orthogonalize a value by element")
        # launches take turns with products, so what all of them have to be visited for is known before the first turn
        shared = [self.values[s.name].position.first_in("element") for s in self.sums.values() if s.over in SHARED]
        position = max([placed.position, *shared])
        self.product = Product(name, self.named(term, placed).id, position)
        self.values[name] = Placed("element", Position(position.round, max(Phase)).next.first_in("element"))
        return ast.Name(name), self.values[name]

    def sum(self, name: str, written: WrittenCall, term: ast.expr, placed: Placed) -> tuple[ast.expr, Placed]:
        over, code, fail = SUMS[written.op], ast.unparse(written.node), written.source.fail
        if over == "column" and placed.space == "row":
            over = "matrix"
        elif placed.space == "column":
            fail(written.node, f"`{code}`: a value by column cannot be summed; sum the elements that it is made of")
        if written.op is row_sum and self.is_factored:
            fail(
                written.node,
                f"`{code}`: row_sum is over all dimensions but the first, and cannot be used in a rule with values by "
                "row and column; use sum_last",
            )
        if placed.space is None or (over in FINENESS and FINENESS[placed.space] <= FINENESS[over]):
            fail(written.node, f"`{code}`: there is nothing to sum, it has one value for each {over}")
        product = self.product
        if over in SHARED and product is not None and placed.position.round >= product.position.round:
            fail(
                written.node,
                f"`{code}`: a sum over several parameters cannot follow `{product.name.partition('_')[0]}`, which "
                "has memory for some of them at a time; take it before, or use tensor_sum",
            )
        if over in SHARED and placed.space != "tensor":
            term, placed = self.sum_over("tensor", f"{name}_tensor", term, placed, written.op is largest)
        return self.sum_over(over, name, term, placed, written.op is largest)

    def sum_over(
        self, over: str, name: str, term: ast.expr, placed: Placed, is_largest: bool
    ) -> tuple[ast.expr, Placed]:
        if over == "tensor" and placed.space == "element" and self.by_rows:
            term, placed = self.sum_over("row", f"{name}_row", term, placed, is_largest)
        assert placed.space is not None
        for same in self.sums.values():
            if isinstance(term, ast.Name) and (same.term, same.over, same.largest) == (term.id, over, is_largest):
                return ast.Name(same.name), self.values[same.name]
        position = Position(placed.position.round, Phase.COLUMN_SUMS) if over == "column" else placed.position
        made = Sum(name, self.named(term, placed).id, placed.space, over, position, is_largest)
        self.sums[name] = made
        self.values[name] = Placed(made.space, position.next.first_in(made.space))
        return ast.Name(name), self.values[name]

    def needed_for(self, stored: Mapping[str, str], reports: Mapping[str, str]) -> Placement:
        def reads(name: str) -> Sequence[str]:
            if name in self.sums:
                return [self.sums[name].term]
            if self.product is not None and name == self.product.name:
                return [self.product.term]
            return self.computed_by[name].reads if name in self.computed_by else ()

        needed = reachable([*stored, *reports.values()], reads)
        return Placement(
            roles=self.roles,
            spaces=self.spaces,
            is_factored=self.is_factored,
            values={name: placed for name, placed in self.values.items() if name in needed},
            statements=[s for s in self.statements if needed & set(s.targets)],
            computed_by={name: statement for name, statement in self.computed_by.items() if name in needed},
            sums=[s for s in self.sums.values() if s.name in needed],
            product=self.product if self.product is not None and self.product.name in needed else None,
            stored=stored,
            reports=reports,
        )


def _as_late_as_possible(placement: Placement) -> Placement:
    """Sums are taken just before they are needed: in a round that visits the same roles anyway."""
    values, sums = dict(placement.values), {s.name: s for s in placement.sums}
    for summation in reversed([s for s in placement.sums if s.over in ("row", "column", "matrix", "tensor")]):
        needed_at = [
            values[n].position for n, statement in placement.computed_by.items() if summation.name in statement.reads
        ]
        needed_at += [other.position for other in sums.values() if other.term == summation.name]
        if needed_at:
            visits, end = summation.position.phase.space, min(needed_at)
            later = [p for p in summation.position.until(end) if p.phase.space == visits]
            position = max((p for p in later if p.next.first_in(summation.space) <= end), default=summation.position)
            sums[summation.name] = replace(summation, position=position)
            values[summation.name] = replace(values[summation.name], position=position.next.first_in(summation.space))
    return replace(placement, values=values, sums=list(sums.values()))


def _joined(spaces: Iterable[str | None]) -> str | None:
    """The space of an expression whose operands have these: the finest; the element, for a row and a column."""
    found = set(spaces)
    return "element" if found >= {"row", "column"} else max(found, key=FINENESS.__getitem__)


def _operands(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    if isinstance(node, ast.Compare):
        return [node.left, node.comparators[0]]
    if isinstance(node, ast.Call):
        return node.args
    assert isinstance(node, ast.Tuple)
    return node.elts


def _with_operands(node: ast.expr, operands: Sequence[ast.expr]) -> ast.expr:
    if isinstance(node, ast.BinOp):
        return ast.BinOp(operands[0], node.op, operands[1])
    if isinstance(node, ast.UnaryOp):
        return ast.UnaryOp(node.op, operands[0])
    if isinstance(node, ast.Compare):
        return ast.Compare(operands[0], node.ops, [operands[1]])
    if isinstance(node, ast.Call):
        return ast.Call(node.func, list(operands), [])
    return ast.Tuple(list(operands))
