"""The Numba kernels of a rule's stages, as source text.

Straight through memory: one loop over chunks, one over elements. Where rows matter or terms are summed: row by row,
or segment by segment, with the lanes of ``fusedadam.rules.sums`` in memory on the stack, where they stay in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusedadam.backends.numba.load_store import LoadStore
from fusedadam.codegen import indented
from fusedadam.formats.noise import SPREAD
from fusedadam.rules.stages import Stage
from fusedadam.rules.sums import COLUMN_SEGMENT, LANES, SEGMENT
from fusedadam.tensors.shards import INDEX_FIELDS

# A kernel is given the address of these: one int64 (or the bits of a float64) each.
# ``per_block`` is always 32, but a compiler that knew it would unroll the loops over a block and not vectorize them.
ARGUMENTS = (
    "table", "tensors", "chunk_tensor", "chunk_first", "chunks", "chunk_size", "batch", "counter", "grad_scale",
    "per_block",
)  # fmt: skip
VOCABULARY = ("calling", "memory", "ops")  # modules whose names a kernel uses
IMPORTS = "\n".join(f"from fusedadam.backends.numba.{module} import *" for module in VOCABULARY)
# Calls a kernel: given the kernel's address and the address of the kernel's own arguments.
WITH_DENORMALS = f"""
{IMPORTS}


@c_function
def run(_arguments):
    call_with_denormals(int64_at(_arguments, 0), int64_at(_arguments, 1))
"""
STRIP = 1024  # elements of short rows, or of formats by block, that are handled together


def source(
    title: str, stage: Stage, fields: Mapping[str, int], storage: Mapping[str, str], compute: str, scaled: bool,
    roles: Sequence[str] = (),
) -> str:  # fmt: skip
    """``fields``: the table's; ``storage``: the formats of roles; ``scaled``: gradients are divided by grad_scale, and
    the last visit that reads them stores them so; ``roles``: all that the rule has."""
    kept = ", ".join(f"{r} {storage[r]}" for r in stage.arrays)
    title = f"# {title}, {stage.space}s: {kept}, computed in {compute}"
    return "\n".join([title, *_Writer(stage, fields, LoadStore(stage, storage, compute, roles), scaled).lines(), ""])


def added(lane: str, term: str, largest: bool) -> str:
    return f"maximum({lane}, {term})" if largest else f"{lane} + {term}"


class _Writer:
    def __init__(self, stage: Stage, fields: Mapping[str, int], memory: LoadStore, scaled: bool) -> None:
        self.stage, self.fields, self.memory, self.scaled = stage, fields, memory, scaled

    def lines(self) -> list[str]:
        stage, compute = self.stage, self.memory.compute
        return [
            IMPORTS,
            "",
            f'number = NUMBER["{compute}"]',
            *([f'_new, _get, _put = scratch("{compute}", {STRIP})'] if stage.in_segments else []),
            *([f'_new_words, _word_at, _put_word = scratch("int32", {STRIP})'] if self.memory.by_block else []),
            *([f'_new_floats, _float_at, _put_float = scratch("f32", {STRIP})'] if self.memory.by_block else []),
            *self.memory.head(),
            "",
            *(f"\n@inline\n{function}\n" for function in (*self.memory.functions(), *stage.functions)),
            "",
            "@kernel",
            "def run(_arguments):",
            *(
                f"    _{name} = {'scalar' if name == 'grad_scale' else 'int64_at'}(_arguments, {k})"
                for k, name in enumerate(ARGUMENTS)
                if name != "per_block" or self.memory.by_block
            ),
            *indented(4, self.tensors() if stage.space == "tensor" else self.arrays()),
        ]

    def entry(self, name: str) -> str:
        return f"_table, {self.fields[name]} * _tensors + _t"

    def tensors(self) -> list[str]:
        stage, memory = self.stage, self.memory
        states = [name for name in stage.arrays if name in memory.roles]

        def store(name: str) -> list[str]:
            value = f"_new_{name}"
            return memory.store(name, "0", value) if name in states else [f"_store_f64({self.entry(name)}, {value})"]

        return [
            "for _t in range(_tensors):",
            *(f"    _at_{name} = int64_at({self.entry(name)})" for name in states),
            *(
                f"    {name} = {memory.load(name, '0') if name in states else f'scalar({self.entry(name)})'}"
                for name in stage.reads
            ),
            f"    {stage.results} = update({', '.join(stage.reads)})",
            *indented(4, [line for name in stage.writes for line in store(name)]),
        ]

    def arrays(self) -> list[str]:
        stage = self.stage
        addresses = {
            name: name for name in (*self.memory.arrays(stage.arrays), *(f"_part_{s.name}" for s in stage.sums))
        }
        addresses |= {name: f"_here_{name}" for name in stage.row_values}
        addresses |= {name: name for name in stage.column_values}
        by_element = stage.space == "element"
        sizes = {"_size": {"element": "_size", "row": "_all_rows", "column": "_columns"}[stage.space]}
        if stage.by_columns:
            sizes = {name: name for name in ("_width", "_height", "_column_segments")}
        elif stage.in_segments:
            of = ("_width", "_pieces", "_segments") if by_element else ("_all_rows", "_row_segments", "_row_segments")
            sizes = dict(zip(("_width", "_pieces", "_segments"), of, strict=True))
            sizes |= {"_height": "_height"} if stage.column_values else {}
        visit = self.columns if stage.by_columns else self.segments if stage.in_segments else self.straight
        return [
            "_next = _end = 0",
            *(f"_lanes_{s.name} = _new()" for s in stage.sums),
            *(f"_wide_{r} = _new()" for r in (*stage.row_values, *stage.column_values) if not stage.by_columns),
            *(f"_wide_{self.memory.formats[r].array_names(r)[-1]} = _new_words()" for r in self.read_by_block),
            *(f"_measured_{r}, _float_{r} = _new_words(), _new_floats()" for r in self.memory.written_by_block),
            "while True:",
            "    if _next == _end:",
            "        _next = take(_counter, _batch)",
            "        _end = min(_next + _batch, _chunks)",
            "        if _next >= _chunks:",
            "            return",
            "    _t, _first = int64_at(_chunk_tensor, _next), int64_at(_chunk_first, _next)",
            "    _next += 1",
            *(f"    _at_{name} = int64_at({self.entry(field)})" for name, field in addresses.items()),
            *(f"    {name} = scalar({self.entry(name)})" for name in stage.scalars),
            *(f"    {name} = int64_at({self.entry(field)})" for name, field in sizes.items()),
            *indented(4, self.keys()),
            *indented(4, visit()),
        ]

    @property
    def read_by_block(self) -> list[str]:
        return [r for r in self.stage.reads if self.memory.formats[r].by_block]

    def keys(self) -> list[str]:
        """Where the noise of stochastic rounding comes from: the step, the seed, and the tensor's place."""
        if not self.memory.is_stochastic:
            return []
        names = ["_step", "_seed", *(name for name in INDEX_FIELDS if name in self.fields)]
        return [
            *(f"{name} = int64_at({self.entry(name)})" for name in names),
            "_key = _step_key(word(_step), word(_seed))",
            "prefer_wide_vectors()",
        ]

    def noise(self) -> list[str]:
        """The hash of the element's index in the whole parameter."""
        if not self.memory.is_stochastic:
            return []
        index = "_i" if "_extent1" not in self.fields else "index_of(_i, _extent1, _extent2, _jump1, _jump2, _jump3)"
        return [f"_hash = _mixed(add(multiply(word(_index + {index}), integer({SPREAD})), _key))"]

    def elements(self, start: str, count: str, visit: Sequence[str]) -> list[str]:
        """Visits up to STRIP elements from ``start`` on; in ``visit`` they are ``_i``, and ``_j`` from 0."""
        around = self.memory.by_block
        return [
            *([f"_begin, _n = {start}, {count}"] if around else []),
            *(["_blocks, _first_block = _n // _per_block, _begin // _per_block"] if around else []),
            *(line for r in self.read_by_block for line in self.memory.widened(r)),
            f"for _j in range({'_n' if around else count}):",
            f"    _i = {'_begin' if around else start} + _j",
            *indented(4, visit),
            *(line for r in self.memory.written_by_block for line in self.memory.stored_by_block(r)),
        ]

    def straight(self) -> list[str]:
        if self.memory.by_block:
            return [
                "_stop = min(_first + _chunk_size, _size)",
                f"for _run in range(_first, _stop, {STRIP}):",
                *indented(4, self.elements("_run", f"min({STRIP}, _stop - _run)", self.visit())),
            ]
        return ["for _i in range(_first, min(_first + _chunk_size, _size)):", *indented(4, self.visit())]

    def segments(self) -> list[str]:
        """Rows of up to STRIP elements: some at a time, their terms side by side. Longer ones: lane by lane."""
        stage, segment, visit = self.stage, SEGMENT[self.stage.space], self.visit()
        several_rows = [
            f"_count, _stride, _terms = min({STRIP} // _width, _stop - _first), _width, _width",
            "_start = _first * _width",
        ]
        one_segment = [
            "_count, _stride = 1, 0",
            f"_start = _first * {segment}",
            f"_terms = min({segment}, _width - _start)",
        ]
        short = [
            *(several_rows if segment > STRIP else one_segment),
            *(
                line
                for r in stage.row_values
                for line in (
                    "for _r in range(_count):",
                    f"    _value = {self.memory.load(r, '_first + _r')}",
                    "    for _j in range(_r * _width, (_r + 1) * _width):",
                    f"        _put(_wide_{r}, _j, _value)",
                )
            ),
            *(
                line
                for c in stage.column_values
                for line in (
                    "for _r in range(_count):",
                    "    _matrix = (_first + _r) // _height",
                    "    for _j in range(_width):",
                    f"        _put(_wide_{c}, _r * _width + _j, {self.memory.load(c, '_matrix * _width + _j')})",
                )
            ),
            *self.elements(
                "_start",
                "_count * _terms",
                [
                    *(f"{r} = _get(_wide_{r}, _j)" for r in (*stage.row_values, *stage.column_values)),
                    *visit,
                    # a lane begins at 0: minus zero must not survive here and nowhere else
                    *(f"_put(_lanes_{s.name}, _j, number(0) + _term_{s.name})" for s in stage.sums),
                ],
            ),
        ]
        long = [
            f"_count, _stride, _terms = 1, 0, {LANES}",
            "_row = _first // _pieces",
            f"_piece = (_first - _row * _pieces) * {segment}",
            "_start = _row * _width + _piece",
            f"_length = min({segment}, _width - _piece)",
            *(f"{r} = {self.memory.load(r, '_row')}" for r in stage.row_values),
            *(["_shift = (_row - _row // _height) * _width"] if stage.column_values else []),
        ]
        visit = [*self.column_values(), *visit]
        if stage.sums:
            visit = [*visit, *self.add()]
            long += [
                *self.empty_lanes(str(LANES)),
                f"for _column in range(0, _length, {LANES}):",
                *indented(4, self.elements("_start + _column", f"min({LANES}, _length - _column)", visit)),
            ]
        elif self.memory.by_block:
            long += [
                f"for _run in range(_start, _start + _length, {STRIP}):",
                *indented(4, self.elements("_run", f"min({STRIP}, _start + _length - _run)", visit)),
            ]
        else:
            long += ["for _i in range(_start, _start + _length):", *indented(4, visit)]
        both = [f"if _width <= {STRIP}:", *indented(4, short), "else:", *indented(4, long)]
        return [
            f"_stop = min(_first + max(1, _chunk_size // min({segment}, _width)), _segments)",
            "while _first < _stop:",
            *indented(4, both if segment > STRIP else short),
            *indented(4, self.finish()),
            "    _first += _count",
        ]

    def column_values(self) -> list[str]:
        """The values of the element's column, which is ``_shift`` before it among the columns of all matrices."""
        return [f"{c} = {self.memory.load(c, '_i - _shift')}" for c in self.stage.column_values]

    def columns(self) -> list[str]:
        """Down a segment of up to STRIP columns, row by row."""
        stage = self.stage
        visit = [*self.column_values(), *self.visit(), *self.add()]
        return [
            f"_blocks = (_width + {STRIP - 1}) // {STRIP}",
            "_above = _first // _blocks",
            f"_column = (_first - _above * _blocks) * {STRIP}",
            "_matrix = _above // _column_segments",
            f"_top = (_above - _matrix * _column_segments) * {COLUMN_SEGMENT}",
            f"_terms = min({STRIP}, _width - _column)",
            *self.empty_lanes("_terms"),
            f"for _down in range(_top, min(_top + {COLUMN_SEGMENT}, _height)):",
            "    _row = _matrix * _height + _down",
            *(f"    {r} = {self.memory.load(r, '_row')}" for r in stage.row_values),
            *(["    _shift = (_row - _matrix) * _width"] if stage.column_values else []),
            *indented(4, self.elements("_row * _width + _column", "_terms", visit)),
            "for _j in range(_terms):",
            *(
                f"    _store_part(_at__part_{s.name}, _above * _width + _column + _j, _get(_lanes_{s.name}, _j))"
                for s in stage.sums
            ),
        ]

    def empty_lanes(self, count: str) -> list[str]:
        puts = (f"    _put(_lanes_{s.name}, _j, number(0))" for s in self.stage.sums)
        return [f"for _j in range({count}):", *puts]

    def add(self) -> list[str]:
        """Adds the terms of an element to the lanes at ``_j``."""
        return [
            f"_put(_lanes_{s.name}, _j, {added(f'_get(_lanes_{s.name}, _j)', f'_term_{s.name}', s.largest)})"
            for s in self.stage.sums
        ]

    def finish(self) -> list[str]:
        """Adds up the terms of each row or segment."""
        finished = [
            f"_store_part(_at__part_{s.name}, _first + _r, {'find_largest' if s.largest else 'add_up'}"
            f"(_lanes_{s.name}, _r * _stride, _terms, {LANES}, _get, _put))"
            for s in self.stage.sums
        ]
        return ["for _r in range(_count):", *indented(4, finished)] if finished else []

    def visit(self) -> list[str]:
        """One element: load, update, store."""
        stage, memory = self.stage, self.memory
        return [
            *(f"{r} = {memory.load(r, '_i')}" for r in stage.reads),
            *(["grad = divide(grad, _grad_scale)"] if self.scaled and "grad" in stage.reads else []),
            f"{stage.results} = update({', '.join(stage.arguments)})",
            *self.noise(),
            *(line for r in stage.writes for line in memory.store(r, "_i", f"_new_{r}")),
            *(memory.store("grad", "_i", "grad") if self.scaled and memory.stores_grad else []),
        ]
