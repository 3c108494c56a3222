"""The eager backend: the rule as it stands, on torch tensors, wherever torch runs.

It is slower than the others (a dozen passes over memory instead of one), but it compiles nothing, and its results are
the same to the bit. Tensors are processed in slices, so that temporaries stay small. Values by row and by tensor are
on the host, since not every device has float64.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusedadam.engine.backend import Backend, sum_across_devices
from fusedadam.engine.geometry import Int64s
from fusedadam.engine.launch_table import LaunchTable
from fusedadam.engine.member import Roles
from fusedadam.formats import FORMAT_OF_DTYPE, FORMATS, loses_bits
from fusedadam.formats.noise import SPREAD, mixed, multiplier, step_key, wrapped
from fusedadam.formats.tensors import load, store
from fusedadam.rules import sums
from fusedadam.rules.ops import OPS
from fusedadam.rules.positions import Position
from fusedadam.rules.stages import Stage, Sum
from fusedadam.rules.sums import COLUMN_SEGMENT, SEGMENT
from fusedadam.tensors.layout import PER_BLOCK

SLICE = 1 << 20
DTYPES = {name: dtype for dtype, name in FORMAT_OF_DTYPE.items()}
Update: TypeAlias = Callable[..., tuple[Tensor, ...]]


def prepare(table: LaunchTable) -> dict[Position, Callable[[Sequence[Roles]], None]]:
    visits = {"element": _elements, "row": _lines, "column": _lines, "tensor": _tensors}

    def runner(stage: Stage) -> Callable[[Sequence[Roles]], None]:
        visit = visits[stage.space](table, stage)
        unfinished = [*filter(table.needs_combining, stage.sums), *stage.matrix_sums]

        def run(member_roles: Sequence[Roles]) -> None:
            if table.found_inf is not None and table.found_inf.item() != 0:
                return
            visit(member_roles)
            for summation in unfinished:
                _finish(table, summation)

        return run

    return {stage.position: runner(stage) for stage in table.specialized.stages}


def _elements(table: LaunchTable, stage: Stage) -> Callable[[Sequence[Roles]], None]:
    compute, number, update = _bind(table, stage, table.device)
    formats = {r: FORMATS[table.formats_of(stage)[r]] for r in stage.arrays}
    arrays = {r: formats[r].array_names(r) for r in stage.arrays}
    every = (item for r, fmt in formats.items() for item in fmt.arrays_of(r).items())
    per_word = {name: PER_BLOCK if array.by == "block" else 1 for name, array in every}
    stochastic = [r for r in stage.writes if formats[r].is_stochastic]
    stores_grad = stage.unscales and not loses_bits(table.formats["grad"], table.compute)

    def visit(roles: Roles, k: int, scalars: Sequence[Tensor], row: slice, column: slice) -> None:
        here = {r: [roles[n][row, _in_words(column, per_word[n])] for n in arrays[r]] for r in stage.arrays}
        values = {r: load(formats[r], here[r], compute) for r in stage.reads}
        if table.grad_scale is not None and "grad" in values:
            values["grad"] = values["grad"] / table.grad_scale.to(compute)
        row_values = [_local_row_values(table, k, r)[row, None].to(table.device) for r in stage.row_values]
        column_values = [
            _of_rows(table, k, _values(table, k, c), row, column).to(table.device) for c in stage.column_values
        ]
        results = update(*values.values(), *row_values, *column_values, *scalars)
        noise_of = _noise(table, k, row, column) if stochastic else None
        for role, value in zip(stage.writes, results, strict=False):
            noise = noise_of(role) if noise_of is not None and role in stochastic else None
            store(formats[role], here[role], value, noise)
        if table.grad_scale is not None and stores_grad:
            store(formats["grad"], here["grad"], values["grad"])
        for summation, term in zip(stage.sums, results[len(stage.writes) :], strict=True):
            terms = term.expand(row.stop - row.start, column.stop - column.start)
            if stage.by_columns:
                height = min(int(table.heights[k]), row.stop - row.start)
                partial = sums.column_segment_sums(terms.reshape(-1, height, terms.shape[-1]), summation.largest)
                place: tuple[slice, ...] = (*_in_matrices(table, k, row), column)
            else:
                partial = sums.segment_sums(terms, SEGMENT["element"], summation.largest)
                place = row, slice(column.start // SEGMENT["element"], -(-column.stop // SEGMENT["element"]))
            _segments(table, k, summation)[place] = partial.to(table.home)

    def run(member_roles: Sequence[Roles]) -> None:
        for k, roles in enumerate(member_roles):
            rows, width = int(table.rows[k]), int(table.widths[k])
            kept = {**roles, **_operands(table, k)}
            flat = {n: kept[n].as_strided((rows, width // each), (width // each, 1)) for n, each in per_word.items()}
            scalars = [number(x) for x in _scalars(table, stage.scalars, k)]
            height = int(table.heights[k]) if stage.by_columns else None
            for row, column in _slices(rows, width, height):
                visit(flat, k, scalars, row, column)

    return run


def _operands(table: LaunchTable, k: int) -> dict[str, Tensor]:
    """The operand of a product of matrices, of the k-th tensor."""
    if table.operands is None or table.specialized.product is None:
        return {}
    return {table.specialized.product.name: _of_member(table.operands, table.sizes, k)}


def _in_words(column: slice, per_word: int) -> slice:
    return slice(column.start // per_word, column.stop // per_word)


def _noise(table: LaunchTable, k: int, row: slice, column: slice) -> Callable[[str], Tensor]:
    """The noise of these elements, by role."""
    width, mapped = int(table.widths[k]), table.index_maps[k]
    rows, columns = (torch.arange(s.start, s.stop, device=table.device) for s in (row, column))
    index = mapped.index_of(rows[:, None] * width + columns).to(torch.int32)
    step, seed = (
        torch.tensor(wrapped(int(table.words[table.fields[name], k])), dtype=torch.int32, device=table.device)
        for name in ("_step", "_seed")
    )
    word: Tensor = mixed(index * SPREAD + step_key(step, seed))
    return lambda role: word * multiplier(role, table.specialized.rule.roles)


def _lines(table: LaunchTable, stage: Stage) -> Callable[[Sequence[Roles]], None]:
    """A stage over rows or columns."""
    _, number, update = _bind(table, stage, table.home)
    counts = table.counts(stage.space)

    def run(member_roles: Sequence[Roles]) -> None:
        for k in range(len(table)):
            if counts[k] == 0:
                continue

            def at(name: str, k: int = k) -> Tensor:
                return member_roles[k][name].view(-1) if name in table.formats else _values(table, k, name)

            # copies: what is written may be kept where something was read
            values = [at(name).to(table.home, torch.float64, copy=True) for name in stage.reads]
            results = update(*values, *(number(x) for x in _scalars(table, stage.scalars, k)))
            for name, value in zip(stage.writes, results, strict=False):
                _store_line(at(name), value)
            for summation, term in zip(stage.sums, results[len(stage.writes) :], strict=True):
                terms = term.expand(1, int(table.all_rows[k]))
                partial = sums.segment_sums(terms, SEGMENT["row"], summation.largest)
                _segments(table, k, summation).copy_(partial[0])

    return run


def _store_line(target: Tensor, value: Tensor) -> None:
    """Values by row, column or tensor, in float64, in the format of a plain tensor."""
    value = value.to(target.device).expand(target.shape)
    store(FORMATS[FORMAT_OF_DTYPE[target.dtype]], [target], value)


def _tensors(table: LaunchTable, stage: Stage) -> Callable[[Sequence[Roles]], None]:
    _, _, update = _bind(table, stage, table.home)

    def read(name: str, member_roles: Sequence[Roles]) -> Tensor:
        if name not in table.formats:
            return table.value(name).clone()
        return torch.stack([roles[name].to(table.home, torch.float64) for roles in member_roles])

    def run(member_roles: Sequence[Roles]) -> None:
        results = update(*(read(name, member_roles) for name in stage.reads))
        for name, value in zip(stage.writes, results, strict=True):
            if name not in table.formats:
                table.value(name).copy_(value)
                continue
            for roles, number in zip(member_roles, value.expand(len(member_roles)), strict=True):
                _store_line(roles[name], number)

    return run


def _bind(
    table: LaunchTable, stage: Stage, device: torch.device
) -> tuple[torch.dtype, Callable[[float], Tensor], Update]:
    """The compute dtype of this stage, a function that makes numbers of it, and ``update`` for torch tensors, which
    returns a tuple."""
    compute = DTYPES[table.compute_of(stage)]

    def number(x: float) -> Tensor:
        # 0-d tensors, since torch computes with Python's numbers in other dtypes
        return torch.tensor(x, dtype=compute, device=device)

    def stored(role: str) -> Callable[[Tensor], Tensor]:
        def round_trip(value: Tensor) -> Tensor:
            fmt = FORMATS[table.formats[role]]
            arrays = [torch.empty_like(value, dtype=array.dtype) for array in fmt.arrays]
            store(fmt, arrays, value)
            return load(fmt, arrays, compute)

        return round_trip

    space: dict[str, Any] = {**OPS, "divide": operator.truediv, "number": number}
    space |= {f"_stored_{role}": stored(role) for role in table.formats}
    exec("\n".join(stage.functions), space)
    update: Any = space["update"]
    is_single = len(stage.writes) + len(stage.sums) == 1
    return compute, number, (lambda *arguments: (update(*arguments),)) if is_single else update


def _slices(rows: int, width: int, height: int | None = None) -> Iterator[tuple[slice, slice]]:
    """Whole rows, or segments of one row. For sums by column of matrices of this height: whole matrices, or segments of
    one matrix."""
    step, end = max(1, SLICE // max(1, width)), rows
    if height:
        step = step // height * height if step >= height else max(1, step // COLUMN_SEGMENT) * COLUMN_SEGMENT
    row = 0
    while row < rows:
        end = min(row + step, rows)
        if height and step < height:  # not beyond this matrix
            end = min(end, row - row % height + height)
        for column in range(0, width, SLICE):
            yield slice(row, end), slice(column, min(column + SLICE, width))
        row = end


def _scalars(table: LaunchTable, names: Sequence[str], k: int) -> list[float]:
    return [float(table.numbers[table.fields[name], k]) for name in names]


def _values(table: LaunchTable, k: int, name: str) -> Tensor:
    """A value by row or by column, for all rows or columns of the k-th tensor."""
    by_row = name in table.specialized.row_buffer_of
    return _of_member(table.buffer_of(name), table.all_rows if by_row else table.columns, k)


def _of_member(buffer: Tensor, counts: Int64s, k: int) -> Tensor:
    """The k-th tensor's part of a buffer, in which each has ``counts`` entries."""
    begin = int(counts[:k].sum())
    return buffer[begin : begin + int(counts[k])]


def _of_rows(table: LaunchTable, k: int, values: Tensor, row: slice, column: slice) -> Tensor:
    """The values by column that belong to these rows."""
    matrix = torch.arange(row.start, row.stop, device=values.device) // int(table.heights[k])
    return values.view(-1, int(table.widths[k]))[:, column][matrix]


def _in_matrices(table: LaunchTable, k: int, row: slice) -> tuple[slice, slice]:
    """Which matrices, and segments of their columns, these rows are: all segments of some, or some of one."""
    height, column_segments = int(table.heights[k]), int(table.column_segments[k])
    first = row.start // height
    if row.stop - row.start >= height:
        return slice(first, row.stop // height), slice(0, column_segments)
    begin = row.start % height
    return slice(first, first + 1), slice(begin // COLUMN_SEGMENT, -(-(begin + row.stop - row.start) // COLUMN_SEGMENT))


def _local_row_values(table: LaunchTable, k: int, name: str) -> Tensor:
    """A value by row, for the rows of the k-th tensor that this process holds."""
    first = int(table.first_rows[k])
    return _values(table, k, name)[first : first + int(table.rows[k])]


def _segments(table: LaunchTable, k: int, summation: Sum) -> Tensor:
    """Where the sums of the k-th tensor's segments are kept: by row and piece, if they are segments of elements; by
    matrix, segment and column, if they are segments of columns."""
    by_column = summation.over == "column"
    if table.needs_combining(summation):
        kept = _of_member(table.partials[summation.name], table.segment_counts(summation), k)
    else:
        kept = (_values if by_column else _local_row_values)(table, k, summation.name)
    if by_column:
        return kept.view(int(table.matrices[k]), int(table.column_segments[k]), int(table.widths[k]))
    return kept.view(int(table.rows[k]), -1) if summation.of == "element" else kept


def _finish(table: LaunchTable, summation: Sum) -> None:
    """Segments into rows, columns or tensors; the rows of a matrix into one value, which each of them gets."""
    over, is_largest = summation.over, summation.largest
    for k in range(len(table)):
        if over == "matrix" and table.all_rows[k]:
            terms = _values(table, k, summation.term).view(-1, int(table.heights[k]))
            result = sums.combine(terms, is_largest)[:, None].expand_as(terms)
            _values(table, k, summation.name).copy_(result.reshape(-1))
        elif over == "column" and table.sizes[k]:  # else nothing is here; what others have comes with the reduction
            result = sums.combine(_segments(table, k, summation).transpose(1, 2), is_largest)
            _values(table, k, summation.name).copy_(result.reshape(-1))
        elif over in ("row", "tensor"):
            partial = _segments(table, k, summation) if table.segments[summation.of][k] else torch.zeros(1, 0)
            if over == "row":
                _local_row_values(table, k, summation.name).copy_(sums.combine(partial, is_largest))
            else:
                table.value(summation.name)[k] = sums.combine(partial.flatten(), is_largest)


BACKEND = Backend(prepare, sum_across_devices, needs_tensors=True)
