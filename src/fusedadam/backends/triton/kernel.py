"""The Triton kernels of a rule's stages, as source text: one program a chunk, for all tensors of a launch.

A chunk that is full and whose tensors are aligned takes the plain path, whose loads and stores the compiler makes
16 bytes wide; every other chunk takes the masked one. Where rows matter or terms are summed, a chunk is some segments
of rows, side by side.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusedadam.backends.triton.load_store import TYPES, LoadStore
from fusedadam.generated import indented
from fusedadam.rules.positions import START
from fusedadam.rules.stages import Stage
from fusedadam.rules.sums import SEGMENT

ARGUMENTS = "table, numbers, tensors, chunk_tensor, chunk_first, grad_scale, found_inf"


def source(
    title: str, stage: Stage, fields: Mapping[str, int], storage: Mapping[str, str], compute: str, scaled: bool,
    interpreted: bool
) -> str:  # fmt: skip
    """``fields``: the table's; ``storage``: the formats of arrays; ``scaled``: with AMP's scale and infinities."""
    kept = ", ".join(f"{r} {storage[r]}" for r in stage.arrays)
    title = f"# {title}, {stage.space}s: {kept}, computed in {compute}"
    memory = LoadStore(stage, storage, compute, interpreted)
    return "\n".join([title, *_Writer(stage, fields, memory, scaled and stage.space == "element").lines(), ""])


class _Writer:
    def __init__(self, stage: Stage, fields: Mapping[str, int], memory: LoadStore, scaled: bool) -> None:
        self.stage, self.fields, self.memory, self.scaled = stage, fields, memory, scaled
        self.compute = TYPES[memory.compute]
        self.partial_fields = [f"_part_{s.name}" for s in stage.sums]

    def lines(self) -> list[str]:
        stage, functions = self.stage, self.memory.functions()
        suffix = "64" if self.memory.compute == "f64" else ""
        ops = ["abs", "fold", "maximum", "minimum", "power", "where"]
        ops += [f"{op}{suffix} as {op}" for op in ("divide", "number", "sqrt")]
        ops += ["bits_of_float", "float_of_bits", "narrow", "widen"] if functions else []
        shapes = (
            "BLOCK" if stage.space == "tensor" else "ROWS, LANES, LOG, RUN" if stage.in_segments else "CHUNK, BLOCK"
        )
        return [
            "import triton",
            "import triton.language as tl",
            f"from fusedadam.backends.triton.ops import {', '.join(ops)}",
            "",
            *(f"\n@triton.jit\n{function}\n" for function in (*functions, *stage.functions)),
            "",
            '@triton.jit(do_not_specialize=["tensors"])',
            f"def run({ARGUMENTS}, {', '.join(f'{name}: tl.constexpr' for name in shapes.split(', '))}):",
            *indented(4, self.tensors() if stage.space == "tensor" else self.arrays()),
        ]

    def entry(self, name: str, table: str = "table") -> str:
        return f"tl.load({table} + {self.fields[name]} * tensors + _t)"

    def tensors(self) -> list[str]:
        places = {name: f"numbers + {self.fields[name]} * tensors + _t" for name in self.stage.arrays}
        return [
            "_t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
            "_live = _t < tensors",
            *(f"{name} = tl.load({places[name]}, mask=_live, other=0)" for name in self.stage.reads),
            f"{self.results()} = update({', '.join(self.stage.reads)})",
            *(f"tl.store({places[name]}, _new_{name}, mask=_live)" for name in self.stage.writes),
        ]

    def arrays(self) -> list[str]:
        stage, arrays = self.stage, self.memory.arrays(self.stage.arrays)
        stop_at_inf = [
            "if tl.load(found_inf) != 0:",
            "    return",
            f"_scale = tl.load(grad_scale).to({self.compute})",
        ]
        # backwards, if this is not the first visit: what was visited last is still in the cache
        chunk = "tl.num_programs(0) - 1 - tl.program_id(0)" if stage.position > START else "tl.program_id(0)"
        return [
            *(stop_at_inf if self.scaled else []),
            f"_chunk = {chunk}",
            "_t = tl.load(chunk_tensor + _chunk)",
            "_first = tl.load(chunk_first + _chunk)",
            *(f"_at_{name} = {self.entry(name)}" for name in (*arrays, *self.partial_fields)),
            *(f"_at_{name} = {self.entry(f'_here_{name}')}" for name in stage.row_values),
            *(f"{s} = {self.entry(s, 'numbers')}.to({self.compute})" for s in stage.scalars),
            f"_together = {' | '.join(f'_at_{name}' for name in arrays)}",
            *(self.segments() if stage.in_segments else self.straight()),
        ]

    def straight(self) -> list[str]:
        loop = "for _offset in range(0, CHUNK, BLOCK):"
        return [
            f"_size = {self.entry('_size' if self.stage.space == 'element' else '_all_rows')}",
            "if (_first + CHUNK <= _size) & (_together % 16 == 0):",
            *indented(4, [*self.pointers(aligned=True), loop]),
            "        _i = tl.multiple_of(_first + _offset, BLOCK) + tl.arange(0, BLOCK)",
            *indented(8, self.visit(mask="")),
            "else:",
            *indented(4, [*self.pointers(aligned=False), loop]),
            "        _i = _first + _offset + tl.arange(0, BLOCK)",
            "        _live = _i < _size",
            *indented(8, self.visit(mask=", mask=_live")),
        ]

    def segments(self) -> list[str]:
        stage, size = self.stage, SEGMENT[self.stage.space]
        geometry = ("_width", "_pieces", "_segments")
        if stage.space == "row":  # the rows of a tensor are one row of rows
            geometry = ("_all_rows", "_row_segments", "_row_segments")
        return [
            f"_width = {self.entry(geometry[0])}",
            f"_pieces = {self.entry(geometry[1])}",
            f"_segments = {self.entry(geometry[2])}",
            "_aligned = (_width % 16 == 0) & (_together % 16 == 0)",
            "_turns = tl.minimum((_segments - _first + ROWS - 1) // ROWS, RUN)",
            "for _turn in range(0, _turns):",
            "    _k = _first + _turn * ROWS + tl.arange(0, ROWS)",
            "    _live_row = _k < _segments",
            "    if ROWS > 1:  # only short rows are handled side by side: each is whole",
            "        _row = _k",
            "        _start = _row * _width",
            "        _longest = _width",
            "    else:",
            "        _row = _k // _pieces",
            f"        _piece = ((_first + _turn) % _pieces) * {size}",
            "        _start = _row * _width + _piece",
            f"        _longest = tl.minimum(_width - _piece, {size})",
            *indented(4, self.rows_and_lanes()),
            "    if _aligned & (_longest % LANES == 0) & (_first + (_turn + 1) * ROWS <= _segments):",
            *indented(8, self.pointers(aligned=True)),
            "        _start = tl.multiple_of(_start, 16)",
            "        for _column in range(0, _longest, LANES):",
            "            _i = _start[:, None] + tl.multiple_of(_column, LANES) + tl.arange(0, LANES)[None, :]",
            *indented(12, [*self.visit(mask=""), *self.add()]),
            "    else:",
            *indented(8, self.pointers(aligned=False)),
            "        for _column in range(0, _longest, LANES):",
            "            _j = _column + tl.arange(0, LANES)[None, :]",
            "            _i = _start[:, None] + _j",
            "            _live = (_j < _longest) & _live_row[:, None]",
            *indented(12, self.visit(mask=", mask=_live")),
            *(f"            _term_{s.name} = tl.where(_live, _term_{s.name}, 0.0)" for s in stage.sums),
            *indented(12, self.add()),
            *(
                f"    tl.store(_at__part_{s.name}.to(tl.pointer_type({self.compute})) + _k, "
                f"fold(_lanes_{s.name}, ROWS, LANES, LOG, {s.largest}), mask=_live_row)"
                for s in stage.sums
            ),
        ]

    def rows_and_lanes(self) -> list[str]:
        """The values by row of these rows, and lanes for what is summed over them."""
        places = {
            r: {n: f"{pointer} + _row" for n, pointer in self.memory.pointers(r).items()} for r in self.stage.row_values
        }
        mask = ", mask=_live_row, other=0"
        return [
            *(f"{r} = {self.memory.load(r, pointers, mask)}[:, None]" for r, pointers in places.items()),
            *(f"_lanes_{s.name} = tl.zeros((ROWS, LANES), {self.compute})" for s in self.stage.sums),
        ]

    def add(self) -> list[str]:
        def joined(lanes: str, term: str, largest: bool) -> str:
            return f"{lanes} = maximum({lanes}, {term})" if largest else f"{lanes} = {lanes} + {term}"

        return [joined(f"_lanes_{s.name}", f"_term_{s.name}", s.largest) for s in self.stage.sums]

    def pointers(self, aligned: bool) -> list[str]:
        plain = {name: raw for r in self.stage.arrays for name, raw in self.memory.pointers(r).items()}
        return [f"_to_{r} = tl.multiple_of({raw}, 16)" if aligned else f"_to_{r} = {raw}" for r, raw in plain.items()]

    def visit(self, mask: str) -> list[str]:
        """A block of elements: load, update, store."""
        stage, memory = self.stage, self.memory
        places = {r: {name: f"_to_{name} + _i" for name in memory.arrays([r])} for r in stage.arrays}
        other = ", other=0" if mask and stage.sums else ""
        return [
            *(f"{r} = {memory.load(r, places[r], mask + other)}" for r in stage.reads),
            *(["grad = divide(grad, _scale)"] if self.scaled and "grad" in stage.reads else []),
            f"{self.results()} = update({', '.join([*stage.reads, *stage.row_values, *stage.scalars])})",
            *(line for r in stage.writes for line in memory.store(r, places[r], f"_new_{r}", mask)),
        ]

    def results(self) -> str:
        names = [*(f"_new_{r}" for r in self.stage.writes), *(f"_term_{s.name}" for s in self.stage.sums)]
        return ", ".join(names) + "," * (len(names) == 1)
