"""The code of a rule in stages: one if it does not sum, else several, which measure, decide and apply.

``placement.py`` says at which position each value is known; a stage computes the values of one position. Values by
row, column and tensor are computed once, in float64, and kept. Values by element are not kept, unless they are roles:
a later stage computes them again from the roles as they are then stored. Therefore a role that is stored before the
last visit of the elements is rounded there and then, and every stage that uses it sees the rounded value. States by
row, column and tensor are stored by the last stage that still reads their old values.

Some formats cannot be read back halfway (8-bit codes, and whatever is rounded stochastically). Roles that are
*deferred* are stored in the last visit that needs them, and until then all stages compute them from the old values,
which are left in place.

A product of matrices is computed between two rounds. Its operand is stored in memory by the visit of the first, and its
result, in the same place, is loaded by visits of later rounds as if it were a role.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fusedadam.rules.lowering import Lowering, call, define
from fusedadam.rules.placement import SHARED, Placement, Product, Statement, Sum, place, reachable
from fusedadam.rules.positions import START, Phase, Position

__all__ = ["Product", "Stage", "Staged", "Sum", "split_into_stages"]


@dataclass(frozen=True)
class Stage:
    """One visit of all elements, rows, columns or tensors.

    ``update(*arguments)`` returns ``writes``, then the terms of ``sums``; if there is only one, not as a tuple. When
    all are visited, ``matrix_sums`` are added up, whose terms are values by row.
    """

    position: Position
    space: str
    reads: tuple[str, ...]  # of its own space: roles, values by row, by column, by tensor
    writes: tuple[str, ...]
    row_values: tuple[str, ...]  # that an element stage reads
    column_values: tuple[str, ...]  # that an element stage reads
    scalars: tuple[str, ...]  # values by tensor that a stage of another space reads
    sums: tuple[Sum, ...]
    functions: tuple[str, ...]  # helpers first, then ``update``
    unscales: bool = False  # no later visit reads gradients: if they are scaled, this one stores them unscaled
    matrix_sums: tuple[Sum, ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        return (*self.reads, *self.row_values, *self.column_values, *self.scalars)

    @property
    def results(self) -> str:
        """The names that a kernel gives to what ``update`` returns, as the left side of an assignment."""
        names = [*(f"_new_{role}" for role in self.writes), *(f"_term_{s.name}" for s in self.sums)]
        return ", ".join(names)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to visit: its matrix sums add up what is there already."""
        return not (self.writes or self.sums)

    @property
    def arrays(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.reads, *self.writes)))

    @property
    def in_segments(self) -> bool:
        """Whether the visit goes row by row, or segment by segment, rather than straight through memory."""
        return bool(self.row_values or self.column_values or self.sums)

    @property
    def by_columns(self) -> bool:
        """Whether an element stage adds up columns, and goes down some of them at a time."""
        return self.position.phase == Phase.COLUMN_SUMS


@dataclass(frozen=True)
class Staged:
    """A rule's code in stages, in the order in which they run."""

    stages: tuple[Stage, ...]
    shared: tuple[Sum, ...]  # over groups or over all: they need every launch of a step
    values: tuple[str, ...]  # by tensor, kept on the device
    reports: Mapping[str, str] = field(hash=False)  # name of the report -> value by tensor
    row_buffer_of: Mapping[str, int] = field(hash=False)  # value by row -> its buffer, which several share in turn
    column_buffer_of: Mapping[str, int] = field(hash=False)  # the same for values by column
    is_factored: bool  # rows are indices of all dimensions but the last, and columns of all but the second-to-last
    summed_states: tuple[str, ...]  # by row, column or tensor, and computed from sums
    product: Product | None  # of matrices, between two rounds

    @property
    def by_rows(self) -> bool:
        return bool(self.row_buffer_of) or self.is_factored

    @property
    def has_sums(self) -> bool:
        return any(stage.sums for stage in self.stages)


def split_into_stages(
    lowering: Lowering, body: Sequence[ast.stmt], stored: Sequence[str], reports: Sequence[str],
    deferred: Collection[str],
) -> Staged:  # fmt: skip
    """``body``: straight-line code; ``stored``: the roles that it assigns and returns; ``reports``: values to keep;
    ``deferred``: the roles that are stored in the last visit of the elements only."""
    placement = place(lowering, body, stored, reports)
    stages = _Emitter(placement, deferred, [helper.text for helper in lowering.helpers.values()]).stages()
    last_to_read_grad = max(
        (k for k, stage in enumerate(stages) if stage.space == "element" and "grad" in stage.reads), default=None
    )
    if last_to_read_grad is not None:
        stages[last_to_read_grad] = replace(stages[last_to_read_grad], unscales=True)
    return Staged(
        stages=tuple(stages),
        shared=tuple(s for s in placement.sums if s.over in SHARED),
        values=tuple(name for name, placed in placement.values.items() if placed.space == "tensor"),
        reports=placement.reports,
        row_buffer_of=_assign_buffers("row", placement, stages),
        column_buffer_of=_assign_buffers("column", placement, stages),
        is_factored=placement.is_factored,
        summed_states=tuple(_summed_states(placement)),
        product=placement.product,
    )


def _summed_states(placement: Placement) -> Iterator[str]:
    sums, computed_by = {s.name for s in placement.sums}, placement.computed_by
    for name, role in placement.stored.items():
        needed = reachable([name], lambda n: computed_by[n].reads if n in computed_by else ())
        if placement.spaces[role] != "element" and needed & sums:
            yield role


@dataclass(frozen=True)
class _Visit:
    """What one visit of the elements loads, computes, and is given from outside (scalars, values by row and tensor)."""

    loaded: set[str]  # a role's old value has the role's name, a new one its own
    computed: set[str]
    given: set[str]


class _Emitter:
    """Writes the code of each stage."""

    def __init__(self, placement: Placement, deferred: Collection[str], helpers: Sequence[str]) -> None:
        self.placement, self.deferred, self.helpers = placement, deferred, helpers
        self.values, self.computed_by = placement.values, placement.computed_by
        self.element_sums = [s for s in placement.sums if s.of == "element"]
        self.products = [] if placement.product is None else [placement.product]
        self.needs: list[Sum | Product] = [*self.element_sums, *self.products]
        self.roles = [role for role in placement.roles if placement.spaces[role] == "element"]
        self.stored = {name: role for name, role in placement.stored.items() if role in self.roles}
        known_at = {role: self.values[name].position.first_in("element") for name, role in self.stored.items()}
        needed_at = [s.position.first_in("element") for s in self.needs]
        self.last = max([*known_at.values(), *needed_at], default=START)
        # stored when the elements are next visited anyway: for a sum or a product, or for the last time
        visited = sorted({self.last, *needed_at})
        store_at = {role: next(p for p in visited if p >= known) for role, known in known_at.items()}
        in_last_visit = {role: self.last for role in known_at if role in deferred}
        late = self.stored_after_last_use({**store_at, **in_last_visit})
        self.store_at = self.stored_after_last_use({**late, **self.no_later_than_needed(store_at, late)})
        self.coarse_stores = {
            name: self.coarse_store_at(name, role) for name, role in placement.stored.items() if role not in self.roles
        }

    def stages(self) -> list[Stage]:
        elements = [self.element_stage(position) for position in self.visits(self.store_at)]
        coarse = {(self.values[n].space, self.values[n].position) for n in self.computed_by}
        coarse |= {(s.of, s.position) for s in self.placement.sums if s.of == "row"}
        coarse |= {(self.placement.spaces[self.placement.stored[n]], at) for n, at in self.coarse_stores.items()}
        others = [self.coarse_stage(space, at, elements) for space, at in coarse if space not in (None, "element")]
        return sorted(elements + others, key=lambda stage: stage.position)

    def coarse_store_at(self, name: str, role: str) -> Position:
        """When a state by row, column or tensor is stored: by the last stage that reads its old value."""
        known = self.values[name].position.first_in(self.placement.spaces[role])
        read_at = [self.values[n].position for n, by in self.computed_by.items() if role in by.reads]
        return max([known, *read_at])

    def stored_after_last_use(self, store_at: Mapping[str, Position]) -> Mapping[str, Position]:
        """When each role is stored: not before a visit that still reads its old value."""
        late = {
            name: position
            for position in self.visits(store_at)
            for name in self.visit(position, store_at).loaded
            if name in store_at and store_at[name] < position
        }
        # a role that is stored later is computed once more until then, and that may read other old values
        return self.stored_after_last_use({**store_at, **late}) if late else store_at

    def no_later_than_needed(self, first: Mapping[str, Position], late: Mapping[str, Position]) -> dict[str, Position]:
        """For each deferred role, the last visit that computes something else from its new value."""
        positions: dict[str, Position] = {}
        for name, role in self.stored.items():
            if role in self.deferred:
                needed = [at for at in self.visits(late) if name in self.visit(at, late, without=name).computed]
                positions[role] = max([first[role], *needed])
        return positions

    def visits(self, store_at: Mapping[str, Position]) -> list[Position]:
        return sorted({*store_at.values(), *(s.position for s in self.needs)})

    def results(self, position: Position, store_at: Mapping[str, Position]) -> list[str]:
        """The new values of the roles that are stored here."""
        return [name for name, role in self.stored.items() if store_at[role] == position]

    def visit(self, position: Position, store_at: Mapping[str, Position], without: str | None = None) -> _Visit:
        """``without``: the new value of a role, as if it were not stored."""
        stored = {name for name, role in self.stored.items() if store_at[role] < position}
        in_memory = {*self.roles, *stored, *(p.name for p in self.products)}

        def is_computed(name: str) -> bool:
            return name not in in_memory and name in self.computed_by and self.values[name].space in (None, "element")

        goals = [name for name in self.results(position, store_at) if name != without]
        goals += [s.term for s in self.needs if s.position == position]
        names = reachable(goals, lambda name: self.computed_by[name].reads if is_computed(name) else ())
        computed = {name for name in names if is_computed(name)}
        return _Visit(names & in_memory, computed, names - in_memory - computed)

    def element_stage(self, position: Position) -> Stage:
        visit, stored = self.visit(position, self.store_at), self.stored
        body: list[ast.stmt] = []
        for statement in self.in_order(visit.computed):
            body.append(_assignment(statement))
            for target in statement.targets:
                role = stored.get(target)
                if role is not None and role not in self.deferred and self.store_at[role] < self.last:
                    rounded = call(f"_stored_{role}", ast.Name(target))
                    body.append(ast.Assign([ast.Name(target)], rounded))
        roles = {stored.get(name, name): name for name in visit.loaded}
        in_memory = (*self.roles, *(p.name for p in self.products))
        reads = {roles[name]: name for name in in_memory if name in roles}
        writes = [(name, stored[name]) for name in self.results(position, self.store_at)]
        writes += [(p.term, p.name) for p in self.products if p.position == position]
        sums = [s for s in self.element_sums if s.position == position]
        return self.stage(position, "element", reads, writes, visit.given, sums, body)

    def coarse_stage(self, space: str, position: Position, elements: Sequence[Stage]) -> Stage:
        """A stage over rows, columns or tensors."""
        values, computed_by = self.values, self.computed_by
        of_rows = [s for s in self.placement.sums if s.of == space == "row" and s.position == position]
        sums = [s for s in of_rows if s.over != "matrix"]
        goals = {n for n in computed_by if (values[n].space, values[n].position) == (space, position)}
        stored = {
            name: role
            for name, role in self.placement.stored.items()
            if self.coarse_stores.get(name) == position and self.placement.spaces[role] == space
        }

        def is_computed(name: str) -> bool:
            return name in goals or (name in computed_by and values[name].space is None)

        terms = [s.term for s in sums]
        names = reachable([*goals, *terms, *stored], lambda name: computed_by[name].reads if is_computed(name) else ())
        computed = {name for name in names if is_computed(name)}
        given = names - computed
        inner = {name for name in given if space == "tensor" or values[name].space == space}
        used_elsewhere = {
            *(name for stage in elements for name in (*stage.row_values, *stage.column_values, *stage.scalars)),
            *(name for name, at in self.coarse_stores.items() if at != position),
            *self.placement.reports.values(),
            *(s.term for s in self.placement.sums if s not in sums),
            *(n for name, statement in computed_by.items() if name not in goals for n in statement.reads),
        }
        body = [_assignment(statement) for statement in self.in_order(computed)]
        reads = {n: n for n in values if n in inner}
        writes = [(n, n) for n in values if n in goals & used_elsewhere]
        made = self.stage(position, space, reads, writes, given - inner, sums, body, stored)
        return replace(made, matrix_sums=tuple(s for s in of_rows if s.over == "matrix"))

    def in_order(self, computed: set[str]) -> list[Statement]:
        """The statements that compute these values."""
        return [statement for statement in self.placement.statements if computed & set(statement.targets)]

    def stage(
        self, position: Position, space: str, reads: Mapping[str, str], writes: Sequence[tuple[str, str]],
        given: set[str], sums: Sequence[Sum], body: Sequence[ast.stmt], states: Mapping[str, str] = {},
    ) -> Stage:  # fmt: skip
        """``reads`` and ``writes``: names in the code, and what they are called in memory. ``states``: values that are
        also stored as states by row, column or tensor."""
        values = self.values
        row_values = [n for n in values if n in given and values[n].space == "row"]
        column_values = [n for n in values if n in given and values[n].space == "column"]
        scalars = [n for n in values if n in given and values[n].space in (None, "tensor")]
        arguments = [*reads, *row_values, *column_values, *scalars]
        # conditions are kept as 1 and 0
        decoded = [
            ast.Assign([ast.Name(n)], ast.Compare(ast.Name(n), [ast.NotEq()], [_number(0)]))
            for n in arguments
            if values[n].is_condition
        ]
        encoded: list[ast.expr] = [
            call("where", ast.Name(n), _number(1), _number(0)) if values[n].is_condition else ast.Name(n)
            for n in (*(name for name, _ in writes), *states, *(s.term for s in sums))
        ]
        update = define("update", arguments, [*decoded, *body, ast.Return(_one_or_several(encoded))])
        return Stage(
            position, space, tuple(reads.values()), (*(kept for _, kept in writes), *states.values()),
            tuple(row_values), tuple(column_values), tuple(scalars), tuple(sums), (*self.helpers, update),
        )  # fmt: skip


def _assign_buffers(space: str, placement: Placement, stages: Sequence[Stage]) -> dict[str, int]:
    """A value by row, or by column, takes the buffer of one that no later stage reads."""
    sums = {s.name: s.position for s in placement.sums if s.space == space}
    written_at, last_read_at = dict(sums), dict[str, Position]()
    for stage in stages:
        given = stage.row_values if space == "row" else stage.column_values
        names = given if stage.space == "element" else stage.reads if stage.space == space else ()
        last_read_at |= dict.fromkeys(names, stage.position)
        if stage.space == space:
            written_at |= dict.fromkeys(stage.writes, stage.position)
            last_read_at |= {s.term: stage.position for s in stage.matrix_sums}
    buffer_of: dict[str, int] = {}
    free_from: list[Position] = []  # of each buffer
    for name in sorted((n for n in placement.values if n in written_at), key=written_at.__getitem__):
        if name in placement.roles:
            continue
        begin = written_at[name]
        # a stage of this space may write over what it reads; sums are added up while others are still read
        free = (k for k, since in enumerate(free_from) if since < begin or (since == begin and name not in sums))
        buffer_of[name] = next(free, len(free_from))
        free_from[buffer_of[name] : buffer_of[name] + 1] = [last_read_at.get(name, begin)]
    return buffer_of


def _assignment(statement: Statement) -> ast.stmt:
    names: list[ast.expr] = [ast.Name(t) for t in statement.targets]
    return ast.Assign([_one_or_several(names)], statement.value)


def _one_or_several(values: list[ast.expr]) -> ast.expr:
    """Triton before 3.3 knows no tuple of one."""
    return values[0] if len(values) == 1 else ast.Tuple(values)


def _number(x: float) -> ast.expr:
    return call("number", ast.Constant(float(x)))
