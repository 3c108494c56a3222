"""A rule that sums, divided into stages: measure, decide, apply.

A rule reads as if a sum were just another value. But a sum is known only when every element has been visited, so the
code is divided where it waits for one. Each value has a space (element, row, tensor: as many numbers as there are of
those) and a position in this order, which repeats round after round:

    element   visit all elements: store what is final, add up terms by row or by tensor         (measure, apply)
    row       from the rows' sums: values by row, terms to be summed by tensor                  (decide)
    tensor    from the tensors' sums: values by tensor, terms to be summed by group or over all (decide)
    tensor    from the sums over groups or over all
    row       from what was decided by tensor

A value is computed at the first position of its space at which everything it needs is known. Values by row and tensor
are computed once, in float64, and kept. Values by element are not kept, unless they are roles: a later stage computes
them again from the roles as they are then stored. Therefore a role that is stored before the last stage is rounded
there and then, and whoever uses it sees the rounded value, in every stage.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fusedadam.rules.lowering import RESERVED, Function, Lowering, call, define
from fusedadam.rules.ops import SUMS

ROUND = 5
POSITIONS = {"element": (0,), "row": (1, 4), "tensor": (2, 3)}
FINENESS = {"element": 2, "row": 1, "tensor": 0, None: -1}
_OVER = {word.__name__: over for word, over in SUMS.items()}


@dataclass(frozen=True)
class Sum:
    """``name`` is the sum (or the largest) of ``term``, which is known at ``position``, over each row, tensor, ..."""

    name: str
    term: str
    of: str  # the term's space
    over: str
    position: int
    largest: bool


@dataclass(frozen=True)
class Stage:
    """One visit of all elements, rows or tensors: ``update(*reads, *rows, *scalars)`` returns ``writes`` and terms."""

    position: int
    space: str
    reads: tuple[str, ...]  # of its own space: roles, values by row, values by tensor
    writes: tuple[str, ...]
    rows: tuple[str, ...]  # values by row that an element stage reads
    scalars: tuple[str, ...]  # values by tensor that an element or row stage reads
    sums: tuple[Sum, ...]
    functions: tuple[str, ...]  # helpers first, then ``update``

    @property
    def arrays(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.reads, *self.writes)))

    @property
    def in_segments(self) -> bool:
        """Whether the visit goes row by row, or segment by segment, rather than straight through memory."""
        return bool(self.rows or self.sums)


@dataclass(frozen=True)
class Split:
    stages: tuple[Stage, ...]
    shared: tuple[Sum, ...]  # over groups or over all: they need every launch of a step
    values: tuple[str, ...]  # by tensor, kept on the device
    reports: Mapping[str, str] = field(hash=False)  # which value by tensor has the name that it was asked for by
    row_slots: Mapping[str, int] = field(hash=False)  # where values by row are kept; a slot serves several in turn

    @property
    def by_rows(self) -> bool:
        return bool(self.row_slots)

    @property
    def has_sums(self) -> bool:
        return any(stage.sums for stage in self.stages)


@dataclass
class _Known:
    """What is known about a value. Space None: made of scalars and numbers alone, and known anywhere."""

    space: str | None = None
    position: int = 0
    boolean: bool = False


@dataclass
class _Statement:
    targets: tuple[str, ...]
    value: ast.expr
    reads: tuple[str, ...]


def split(
    source: Function, lowering: Lowering, body: Sequence[ast.stmt], roles: Sequence[str], stored: Sequence[str],
    reports: Sequence[str]
) -> Split:  # fmt: skip
    """``body``: straight-line code; ``stored``: the roles that it assigns and returns; ``reports``: values to keep."""
    scalars = [name for name, kind in source.kinds.items() if kind == "Scalar"]
    helpers = {name for name, _ in lowering.helpers.values()}
    splitter = _Splitter(source, scalars, roles, body, helpers, lowering.conditions)
    return splitter.result(stored, reports, [text for _, text in lowering.helpers.values()])


class _Splitter:
    def __init__(
        self, source: Function, scalars: Sequence[str], roles: Sequence[str], body: Sequence[ast.stmt],
        taken: set[str], conditions: set[str],
    ) -> None:  # fmt: skip
        self.source, self.roles, self.taken, self.conditions = source, roles, taken | RESERVED, conditions
        self.known = {name: _Known() for name in scalars} | {name: _Known("element") for name in roles}
        self.current: dict[str, str] = {}  # which version of a name is the present one
        self.statements: list[_Statement] = []
        self.defined: dict[str, int] = {}  # by which statement
        self.sums: dict[str, Sum] = {}
        self.by_rows = any(_calls(node, "row_sum") for statement in body for node in ast.walk(statement))
        for statement in body:
            assert isinstance(statement, ast.Assign)
            self.assign(statement.targets[0], statement.value)

    # from statements to values with a space and a position

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        names = [n.id for n in (target.elts if isinstance(target, ast.Tuple) else [target]) if isinstance(n, ast.Name)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            results = [self.one(name, *self.expression(v)) for name, v in zip(names, value.elts, strict=True)]
        elif len(names) == 1:
            results = [self.one(names[0], *self.expression(value))]
        else:
            results = list(self.define(names, *self.expression(value)))
        self.current.update(zip(names, results, strict=True))

    def one(self, name: str, value: ast.expr, known: _Known) -> str:
        if isinstance(value, ast.Name) and known.space in ("row", "tensor") and name not in self.roles:
            return value.id  # only another name for a sum
        return self.define([name], value, known)[0]

    def define(self, names: Iterable[str], value: ast.expr, known: _Known) -> tuple[str, ...]:
        targets = tuple(self.version(name) for name in names)
        reads = tuple(n.id for n in ast.walk(value) if isinstance(n, ast.Name) and n.id in self.known)
        for target in targets:
            self.known[target] = known
            self.defined[target] = len(self.statements)
        self.statements.append(_Statement(targets, value, reads))
        return targets

    def version(self, name: str) -> str:
        if name not in self.known and name not in self.taken:
            return name
        versions = (f"{name}_{k}" for k in itertools.count(1))
        return next(v for v in versions if v not in self.known and v not in self.taken)

    def expression(self, node: ast.expr) -> tuple[ast.expr, _Known]:
        if isinstance(node, ast.Name):
            name = self.current.get(node.id, node.id)
            return ast.Name(name), self.known[name]
        if isinstance(node, ast.Constant):
            return node, _Known()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _OVER:
            return self.sum(node, node.func.id)
        parts, infos = zip(*map(self.expression, _parts(node)), strict=True)
        space = max((known.space for known in infos), key=FINENESS.__getitem__)
        # what is by row or tensor in an expression by element is computed by itself, once, in float64
        named = [
            self.named(part, known) if known.space not in (None, space) else part
            for part, known in zip(parts, infos, strict=True)
        ]
        chosen = infos[1:] if _calls(node, "where") else infos  # where(condition, a, b) is what a and b are
        joined = isinstance(node, ast.BinOp) or _calls(node, "where")
        boolean = isinstance(node, ast.Compare) or (joined and all(k.boolean for k in chosen))
        boolean = boolean or any(_calls(node, name) for name in self.conditions)
        position = max(known.position for known in infos)
        return _with_parts(node, named), _Known(space, _first(space, position), boolean)

    def named(self, value: ast.expr, known: _Known) -> ast.Name:
        return value if isinstance(value, ast.Name) else ast.Name(self.define(["value"], value, known)[0])

    def sum(self, node: ast.Call, word: str) -> tuple[ast.expr, _Known]:
        term, known = self.expression(node.args[0])
        over = _OVER[word]
        if known.space is None or (over in POSITIONS and FINENESS[known.space] <= FINENESS[over]):
            self.source.fail(node, f"`{ast.unparse(node)}`: there is nothing to sum, it has one value for each {over}")
        name = f"{word}_{node.lineno}_{node.col_offset}"  # the same under all flags
        if over in ("group", "all") and known.space != "tensor":
            term, known = self.sum_over("tensor", f"{name}_tensor", term, known, word == "largest")
        return self.sum_over(over, name, term, known, word == "largest")

    def sum_over(self, over: str, name: str, term: ast.expr, known: _Known, largest: bool) -> tuple[ast.expr, _Known]:
        if over == "tensor" and known.space == "element" and self.by_rows:
            term, known = self.sum_over("row", f"{name}_row", term, known, largest)
        assert known.space is not None
        space = over if over in POSITIONS else "tensor"
        for same in self.sums.values():
            if isinstance(term, ast.Name) and (same.term, same.over, same.largest) == (term.id, over, largest):
                return ast.Name(same.name), self.known[same.name]
        one = Sum(name, self.named(term, known).id, known.space, over, known.position, largest)
        self.sums[name], self.known[name] = one, _Known(space, _first(space, known.position + 1))
        return ast.Name(name), self.known[name]

    # from values to stages

    def result(self, stored: Sequence[str], reports: Sequence[str], helpers: list[str]) -> Split:
        self.finals = {self.current[role]: role for role in stored}
        kept = {r: self.current[r] for r in reports if r in self.current}
        for report, name in kept.items():
            if self.known[name].space != "tensor":
                self.source.fail(
                    self.source.tree, f"`{report}` cannot be reported: it has not one value for each tensor"
                )
        self.needed = self.all_needed([*self.finals, *kept.values()])
        self.delay()
        sums = [s for s in self.sums.values() if s.name in self.needed]
        at = {name: _first("element", self.known[name].position) for name in self.finals}
        self.store_at = {role: at[name] for name, role in self.finals.items()}
        positions = sorted({*at.values(), *(s.position for s in sums if s.of == "element")})
        self.last = max(positions, default=0)
        while True:
            try:
                elements = [self.element_stage(p, sums, helpers) for p in positions]
                break
            except _Overwritten as wanted:  # a later stage still reads what was there before
                self.store_at[wanted.role] = wanted.position
        coarse = {(self.known[n].space, self.known[n].position) for n in self.needed if n in self.defined}
        coarse |= {(s.of, s.position) for s in sums if s.of == "row"}
        stages = elements + [
            self.coarse_stage(space, position, sums, elements, list(kept.values()), helpers)
            for space, position in coarse
            if space in ("row", "tensor")
        ]
        stages.sort(key=lambda s: s.position)
        values = [n for n in self.known if n in self.needed and self.known[n].space == "tensor"]
        return Split(
            stages=tuple(stages),
            shared=tuple(s for s in sums if s.over in ("group", "all")),
            values=tuple(values),
            reports=kept,
            row_slots=self.row_slots(stages, sums),
        )

    def all_needed(self, goals: Sequence[str]) -> set[str]:
        needed: set[str] = set()
        todo = list(goals)
        while todo:
            name = todo.pop()
            if name not in needed:
                needed.add(name)
                if name in self.sums:
                    todo.append(self.sums[name].term)
                elif name in self.defined:
                    todo += self.statements[self.defined[name]].reads
        return needed

    def delay(self) -> None:
        """Sums are taken as late as they are needed: in a round that visits the same roles anyway."""
        for one in reversed([s for s in self.sums.values() if s.over in POSITIONS and s.name in self.needed]):
            readers = [n for n in self.needed & set(self.defined) if one.name in self.statements[self.defined[n]].reads]
            needed_at = [self.known[n].position for n in readers]
            needed_at += [s.position for s in self.sums.values() if s.term == one.name and s.name in self.needed]
            later = range(one.position, min(needed_at, default=0))
            position = max((p for p in later if _first(one.of, p) == p), default=one.position)
            self.sums[one.name] = replace(one, position=position)
            self.known[one.name] = replace(self.known[one.name], position=_first(one.over, position + 1))

    def element_stage(self, position: int, sums: Sequence[Sum], helpers: list[str]) -> Stage:
        mine = [s for s in sums if s.of == "element" and s.position == position]
        writes = {name: role for name, role in self.finals.items() if self.store_at[role] == position}
        statements: set[int] = set()
        reads: dict[str, str] = {}  # role -> the name under which its value goes here
        outer: set[str] = set()
        todo = [*writes, *(s.term for s in mine)]
        while todo:
            name = todo.pop()
            role = self.finals.get(name)
            if name in self.roles:
                if self.store_at.get(name, position) < position:
                    raise _Overwritten(name, position)
                reads[name] = name
            elif role is not None and self.store_at[role] < position:
                reads[role] = name
            elif name in self.defined and self.known[name].space in (None, "element"):
                if self.defined[name] not in statements:
                    statements.add(self.defined[name])
                    todo += self.statements[self.defined[name]].reads
            else:
                outer.add(name)
        body: list[ast.stmt] = []
        for k in sorted(statements):
            one = self.statements[k]
            body.append(_assignment(one))
            for target in one.targets:
                if target in self.finals and self.store_at[self.finals[target]] < self.last:
                    rounded = call(f"_stored_{self.finals[target]}", ast.Name(target))
                    body.append(ast.Assign([ast.Name(target)], rounded))
        in_order = [r for r in self.roles if r in reads]
        results = {role: name for name, role in writes.items()}
        return self.stage(
            position, "element", {reads[r]: r for r in in_order}, {results[r]: r for r in self.roles if r in results},
            outer, mine, body, helpers,
        )  # fmt: skip

    def coarse_stage(
        self, space: str, position: int, sums: Sequence[Sum], elements: Sequence[Stage], kept: Sequence[str], helpers:
        list[str]
    ) -> Stage:  # fmt: skip
        mine = [s for s in sums if s.of == space == "row" and s.position == position]
        here = self.here(space, position)
        body = [self.statements[k] for k in sorted({self.defined[n] for n in here})]
        extra = self.uniform(n for s in body for n in s.reads)
        read = {n for s in (*body, *extra) for n in s.reads} | {s.term for s in mine}
        defined = {t for s in (*body, *extra) for t in s.targets}
        inner = [n for n in self.known if n in read - defined and (self.known[n].space == space or space == "tensor")]
        elsewhere = {n for stage in elements for n in (*stage.rows, *stage.scalars)} | set(kept)
        elsewhere |= {s.term for s in sums if s not in mine}
        for other in self.needed & set(self.defined):
            if (self.known[other].space, self.known[other].position) != (space, position):
                elsewhere |= set(self.statements[self.defined[other]].reads)
        writes = [n for n in self.known if n in here and n in elsewhere]
        outer = read - defined - set(inner)
        statements = [_assignment(s) for s in sorted((*body, *extra), key=self.statements.index)]
        return self.stage(
            position, space, {n: n for n in inner}, {n: n for n in writes}, outer, mine, statements, helpers
        )

    def here(self, space: str, position: int) -> set[str]:
        return {
            n
            for n in self.needed
            if n in self.defined and self.known[n] == _Known(space, position, self.known[n].boolean)
        }

    def uniform(self, names: Iterable[str]) -> list[_Statement]:
        """The statements that make these names of scalars alone."""
        found: dict[int, _Statement] = {}
        todo = list(names)
        while todo:
            k = self.defined.get(name := todo.pop())
            if k is not None and self.known[name].space is None and k not in found:
                found[k] = self.statements[k]
                todo += self.statements[k].reads
        return list(found.values())

    def stage(
        self, position: int, space: str, reads: Mapping[str, str], writes: Mapping[str, str], outer: set[str],
        sums: Sequence[Sum], body: Sequence[ast.stmt], helpers: list[str],
    ) -> Stage:  # fmt: skip
        """``reads`` and ``writes``: names in the code, and what they are called in memory."""
        rows = [n for n in self.known if n in outer and self.known[n].space == "row"]
        scalars = [n for n in self.known if n in outer and self.known[n].space in (None, "tensor")]
        arguments = [*reads, *rows, *scalars]
        # conditions are kept as 1 and 0
        decoded = [
            ast.Assign([ast.Name(n)], ast.Compare(ast.Name(n), [ast.NotEq()], [_number(0)]))
            for n in arguments
            if self.known[n].boolean
        ]
        results = [*writes, *(s.term for s in sums)]
        encoded: list[ast.expr] = [
            call("where", ast.Name(n), _number(1), _number(0)) if self.known[n].boolean else ast.Name(n)
            for n in results
        ]
        update = define("update", arguments, [*decoded, *body, ast.Return(ast.Tuple(encoded))])
        return Stage(
            position, space, tuple(reads.values()), tuple(writes.values()), tuple(rows), tuple(scalars), tuple(sums),
            (*helpers, update),
        )  # fmt: skip

    def row_slots(self, stages: Sequence[Stage], sums: Sequence[Sum]) -> dict[str, int]:
        """A value by row takes the slot of one that nobody reads any more."""
        born = {s.name: s.position for s in sums if s.over == "row"}
        died: dict[str, int] = {}
        for stage in stages:
            names = stage.rows if stage.space == "element" else stage.reads if stage.space == "row" else ()
            died |= dict.fromkeys(names, stage.position)
            if stage.space == "row":
                born |= dict.fromkeys(stage.writes, stage.position)
        slots: dict[str, int] = {}
        free_from: list[int] = []  # of each slot
        for name in sorted(born, key=lambda n: (born[n], list(self.known).index(n))):
            # a row stage may write over what it reads; an element stage adds up sums while others are still read
            until = born[name] - (name in self.sums)
            slots[name] = next((k for k, since in enumerate(free_from) if since <= until), len(free_from))
            free_from[slots[name] : slots[name] + 1] = [died.get(name, born[name])]
        return slots


class _Overwritten(Exception):
    def __init__(self, role: str, position: int) -> None:
        self.role, self.position = role, position


def _first(space: str | None, position: int) -> int:
    """The first position of this space from here on."""
    if space is None:
        return position
    rounds, rest = divmod(position, ROUND)
    for offset in POSITIONS[space]:
        if offset >= rest:
            return rounds * ROUND + offset
    return (rounds + 1) * ROUND + POSITIONS[space][0]


def _calls(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _assignment(statement: _Statement) -> ast.stmt:
    names: list[ast.expr] = [ast.Name(t) for t in statement.targets]
    return ast.Assign([names[0] if len(names) == 1 else ast.Tuple(names)], statement.value)


def _number(x: float) -> ast.expr:
    return call("number", ast.Constant(float(x)))


def _parts(node: ast.expr) -> list[ast.expr]:
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


def _with_parts(node: ast.expr, parts: Sequence[ast.expr]) -> ast.expr:
    if isinstance(node, ast.BinOp):
        return ast.BinOp(parts[0], node.op, parts[1])
    if isinstance(node, ast.UnaryOp):
        return ast.UnaryOp(node.op, parts[0])
    if isinstance(node, ast.Compare):
        return ast.Compare(parts[0], node.ops, [parts[1]])
    if isinstance(node, ast.Call):
        return ast.Call(node.func, list(parts), [])
    return ast.Tuple(list(parts))
