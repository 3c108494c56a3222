"""The Numba kernels of a rule's stages, as source text.

Straight through memory: one loop over chunks, one over elements. Where rows matter or terms are summed: row by row,
or segment by segment, with the lanes of ``fusedadam.rules.sums`` in memory on the stack, where they stay in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusedadam.backends.numba.load_store import LoadStore
from fusedadam.generated import indented
from fusedadam.rules.stages import Stage
from fusedadam.rules.sums import LANES, SEGMENT

# A kernel is given the address of these: one int64 (or the bits of a float64) each.
ARGUMENTS = (
    "table",
    "tensors",
    "chunk_tensor",
    "chunk_first",
    "chunks",
    "chunk_size",
    "batch",
    "counter",
    "grad_scale",
)
# Calls a kernel: given the kernel's address and the address of the kernel's own arguments.
WITH_DENORMALS = """
from fusedadam.backends.numba.ops import *


@kernel
def run(_arguments):
    call_with_denormals(int64_at(_arguments, 0), int64_at(_arguments, 1))
"""
BLOCK = 1024  # elements of short rows that are handled together


def source(
    title: str, stage: Stage, fields: Mapping[str, int], storage: Mapping[str, str], compute: str, scaled: bool
) -> str:
    """``fields``: the table's; ``storage``: the formats of arrays; ``scaled``: gradients are divided by grad_scale."""
    kept = ", ".join(f"{r} {storage[r]}" for r in stage.arrays)
    title = f"# {title}, {stage.space}s: {kept}, computed in {compute}"
    return "\n".join([title, *_Writer(stage, fields, LoadStore(stage, storage, compute), scaled).lines(), ""])


class _Writer:
    def __init__(self, stage: Stage, fields: Mapping[str, int], memory: LoadStore, scaled: bool) -> None:
        self.stage, self.fields, self.memory, self.scaled = stage, fields, memory, scaled

    def lines(self) -> list[str]:
        stage, compute = self.stage, self.memory.compute
        return [
            "from fusedadam.backends.numba.ops import *",
            "",
            f'number = NUMBER["{compute}"]',
            *([f'_new, _get, _put = scratch("{compute}", {BLOCK})'] if stage.in_segments else []),
            *self.memory.head(),
            "",
            *(f"\n@inline\n{function}\n" for function in (*self.memory.functions(), *stage.functions)),
            "",
            "@kernel",
            "def run(_arguments):",
            *(
                f"    _{name} = {'scalar' if name == 'grad_scale' else 'int64_at'}(_arguments, {k})"
                for k, name in enumerate(ARGUMENTS)
            ),
            *indented(4, self.tensors() if stage.space == "tensor" else self.arrays()),
        ]

    def entry(self, name: str) -> str:
        return f"_table, {self.fields[name]} * _tensors + _t"

    def tensors(self) -> list[str]:
        stage = self.stage
        return [
            "for _t in range(_tensors):",
            *(f"    {name} = scalar({self.entry(name)})" for name in stage.reads),
            f"    {self.results()} = update({', '.join(stage.reads)})",
            *(f"    _store_f64({self.entry(name)}, _new_{name})" for name in stage.writes),
        ]

    def arrays(self) -> list[str]:
        stage = self.stage
        addresses = {
            name: name for name in (*self.memory.arrays(stage.arrays), *(f"_part_{s.name}" for s in stage.sums))
        }
        addresses |= {name: f"_here_{name}" for name in stage.row_values}
        by_element = stage.space == "element"
        sizes = {"_size": "_size" if by_element else "_all_rows"}
        if stage.in_segments:
            of = ("_width", "_pieces", "_segments") if by_element else ("_all_rows", "_row_segments", "_row_segments")
            sizes = dict(zip(("_width", "_pieces", "_segments"), of, strict=True))
        return [
            "_next = _end = 0",
            *(f"_lanes_{s.name} = _new()" for s in stage.sums),
            *(f"_wide_{r} = _new()" for r in stage.row_values),
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
            *indented(4, self.segments() if stage.in_segments else self.straight()),
        ]

    def straight(self) -> list[str]:
        return ["for _i in range(_first, min(_first + _chunk_size, _size)):", *indented(4, self.visit())]

    def segments(self) -> list[str]:
        """Rows of up to BLOCK elements: some at a time, their terms side by side. Longer ones: lane by lane."""
        stage, segment, visit = self.stage, SEGMENT[self.stage.space], self.visit()
        several_rows = [
            f"_count, _stride, _terms = min({BLOCK} // _width, _stop - _first), _width, _width",
            "_start = _first * _width",
        ]
        one_segment = [
            "_count, _stride = 1, 0",
            f"_start = _first * {segment}",
            f"_terms = min({segment}, _width - _start)",
        ]
        short = [
            *(several_rows if segment > BLOCK else one_segment),
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
            "for _j in range(_count * _terms):",
            "    _i = _start + _j",
            *(f"    {r} = _get(_wide_{r}, _j)" for r in stage.row_values),
            *indented(4, visit),
            # a lane begins at 0: minus zero must not survive here and nowhere else
            *(f"    _put(_lanes_{s.name}, _j, number(0) + _term_{s.name})" for s in stage.sums),
        ]
        long = [
            f"_count, _stride, _terms = 1, 0, {LANES}",
            "_row = _first // _pieces",
            f"_piece = (_first - _row * _pieces) * {segment}",
            "_start = _row * _width + _piece",
            f"_length = min({segment}, _width - _piece)",
            *(f"{r} = {self.memory.load(r, '_row')}" for r in stage.row_values),
        ]
        if stage.sums:
            lane = {s: f"_get(_lanes_{s.name}, _j)" for s in stage.sums}
            added = [
                f"_put(_lanes_{s.name}, _j, "
                + (f"maximum({lane[s]}, _term_{s.name}))" if s.largest else f"{lane[s]} + _term_{s.name})")
                for s in stage.sums
            ]
            long += [
                f"for _j in range({LANES}):",
                *(f"    _put(_lanes_{s.name}, _j, number(0))" for s in stage.sums),
                f"for _column in range(0, _length, {LANES}):",
                f"    for _j in range(min({LANES}, _length - _column)):",
                "        _i = _start + _column + _j",
                *indented(8, [*visit, *added]),
            ]
        else:
            long += ["for _i in range(_start, _start + _length):", *indented(4, visit)]
        both = [f"if _width <= {BLOCK}:", *indented(4, short), "else:", *indented(4, long)]
        return [
            f"_stop = min(_first + max(1, _chunk_size // min({segment}, _width)), _segments)",
            "while _first < _stop:",
            *indented(4, both if segment > BLOCK else short),
            *indented(4, self.finish()),
            "    _first += _count",
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
            f"{self.results()} = update({', '.join([*stage.reads, *stage.row_values, *stage.scalars])})",
            *(line for r in stage.writes for line in memory.store(r, "_i", f"_new_{r}")),
        ]

    def results(self) -> str:
        names = [*(f"_new_{r}" for r in self.stage.writes), *(f"_term_{s.name}" for s in self.stage.sums)]
        return ", ".join(names) + "," * (len(names) == 1)
