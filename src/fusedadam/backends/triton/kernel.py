"""The Triton kernels of a rule's stages, as source text: one program a chunk, for all tensors of a launch.

A chunk that is full and whose tensors are aligned takes the plain path, whose loads and stores the compiler makes
16 bytes wide; every other chunk takes the masked one. Where rows matter or terms are summed, a chunk is some segments
of rows, side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusedadam.backends.triton.load_store import TYPES, LoadStore
from fusedadam.codegen import indented
from fusedadam.formats import BLOCK as PER_BLOCK
from fusedadam.formats.noise import SPREAD
from fusedadam.rules.positions import START
from fusedadam.rules.stages import Stage
from fusedadam.rules.sums import COLUMN_SEGMENT, SEGMENT
from fusedadam.tensors.shards import INDEX_FIELDS

ARGUMENTS = "table, numbers, tensors, chunk_tensor, chunk_first, grad_scale, found_inf"


def source(
    title: str, stage: Stage, fields: Mapping[str, int], storage: Mapping[str, str], compute: str, scaled: bool,
    interpreted: bool, roles: Sequence[str] = (),
) -> str:  # fmt: skip
    """``fields``: the table's; ``storage``: the formats of roles; ``scaled``: with AMP's scale and infinities:
    gradients are divided by the scale, and the last visit that reads them stores them so;
    ``roles``: all that the rule has."""
    kept = ", ".join(f"{r} {storage[r]}" for r in stage.arrays)
    title = f"# {title}, {stage.space}s: {kept}, computed in {compute}"
    memory = LoadStore(stage, storage, compute, interpreted, roles)
    return "\n".join([title, *_Writer(stage, fields, memory, scaled).lines(), ""])


class _Writer:
    def __init__(self, stage: Stage, fields: Mapping[str, int], memory: LoadStore, scaled: bool) -> None:
        self.stage, self.fields, self.memory = stage, fields, memory
        self.scaled = scaled and stage.space == "element"
        self.stops_at_inf = scaled and (stage.space == "element" or any(name in memory.roles for name in stage.writes))
        self.compute = TYPES[memory.compute]
        self.partial_fields = [f"_part_{s.name}" for s in stage.sums]

    def lines(self) -> list[str]:
        stage, functions = self.stage, self.memory.functions()
        suffix = "64" if self.memory.compute == "f64" else ""
        ops = ["abs", "fold", "maximum", "minimum", "power", "where"]
        ops += [f"{op}{suffix} as {op}" for op in ("divide", "number", "sqrt")]
        ops += ["bits_of_float", "float_of_bits", "narrow", "widen"] if functions else []
        ops += ["largest_word"] if self.memory.written_by_block else []
        ops += ["index_of"] if self.memory.is_stochastic and "_extent1" in self.fields else []
        shapes = (
            "BLOCK"
            if stage.space == "tensor"
            else "LANES"
            if stage.by_columns
            else "ROWS, LANES, LOG, RUN, FULL, AHEAD"
            if stage.in_segments
            else "CHUNK, BLOCK"
        )
        if self.memory.is_busy and not stage.in_segments:
            shapes += ", TAIL"
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
        stage, memory = self.stage, self.memory
        states = [name for name in stage.arrays if name in memory.roles]
        places = {name: f"numbers + {self.fields[name]} * tensors + _t" for name in stage.arrays}
        addresses = {
            name: f"tl.load(table + {self.fields[name]} * tensors + _t, mask=_live, other=0)" for name in states
        }

        def load(name: str) -> str:
            if name in states:
                return memory.load(name, memory.pointers(name), ", mask=_live, other=0")
            return f"tl.load({places[name]}, mask=_live, other=0)"

        def store(name: str) -> list[str]:
            if name in states:
                return memory.store(name, memory.pointers(name), f"_new_{name}", ", mask=_live")
            return [f"tl.store({places[name]}, _new_{name}, mask=_live)"]

        return [
            *(self.stop_at_inf() if self.stops_at_inf else []),
            "_t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
            "_live = _t < tensors",
            *(f"_at_{name} = {address}" for name, address in addresses.items()),
            *(f"{name} = {load(name)}" for name in stage.reads),
            f"{self.results()} = update({', '.join(stage.reads)})",
            *(line for name in stage.writes for line in store(name)),
        ]

    def stop_at_inf(self) -> list[str]:
        return ["if tl.load(found_inf) != 0:", "    return"]

    def arrays(self) -> list[str]:
        stage, arrays = self.stage, self.memory.arrays(self.stage.arrays)
        visit = self.columns if stage.by_columns else self.segments if stage.in_segments else self.straight
        # backwards, if this is not the first visit: what was visited last is still in the cache
        chunk = "tl.num_programs(0) - 1 - tl.program_id(0)" if stage.position > START else "tl.program_id(0)"
        return [
            *(self.stop_at_inf() if self.stops_at_inf else []),
            *([f"_scale = tl.load(grad_scale).to({self.compute})"] if self.scaled else []),
            f"_chunk = {chunk}",
            "_t = tl.load(chunk_tensor + _chunk)",
            "_first = tl.load(chunk_first + _chunk)",
            *(f"_at_{name} = {self.entry(name)}" for name in (*arrays, *self.partial_fields)),
            *(f"_at_{name} = {self.entry(f'_here_{name}')}" for name in stage.row_values),
            *(f"_at_{name} = {self.entry(name)}" for name in stage.column_values),
            *(f"{s} = {self.entry(s, 'numbers')}.to({self.compute})" for s in stage.scalars),
            *self.keys(),
            f"_together = {' | '.join(f'_at_{name}' for name in arrays)}",
            *visit(),
        ]

    def keys(self) -> list[str]:
        """Where the noise of stochastic rounding comes from: the step, the seed, and the tensor's place."""
        if not self.memory.is_stochastic:
            return []
        return [
            *(f"{name} = {self.entry(name)}" for name in INDEX_FIELDS if name in self.fields),
            f"_key = _step_key({self.entry('_step')}.to(tl.int32), {self.entry('_seed')}.to(tl.int32))",
        ]

    def noise(self) -> list[str]:
        """The hash of each element's index in the whole parameter."""
        if not self.memory.is_stochastic:
            return []
        straight, spread = not self.stage.in_segments, f"* ({SPREAD})"
        if "_extent1" in self.fields:
            element = "_first + _i" if straight else "_i"
            index = f"index_of({element}, _extent1, _extent2, _jump1, _jump2, _jump3)"
            return [f"_hash = _mixed((_index + {index}).to(tl.int32) {spread} + _key)"]
        if straight:  # one operation for each element: the rest is the same for all of them
            return [f"_hash = _mixed(_i {spread} + ((_index + _first).to(tl.int32) {spread} + _key))"]
        return [f"_hash = _mixed((_index + _i).to(tl.int32) {spread} + _key)"]

    def straight(self) -> list[str]:
        if self.memory.is_busy:
            return self.straight_and_busy()
        loop = "for _offset in range(0, CHUNK, BLOCK):"
        return [
            f"_size = {self.entry({'element': '_size', 'row': '_all_rows', 'column': '_columns'}[self.stage.space])}",
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

    def straight_and_busy(self) -> list[str]:
        """As ``straight``, for formats that keep a processor busy. If one has blocks, each row of a tile is a block.

        Indices are 32-bit, from the chunk's first element on; a tile is loaded while the one before it is updated; and
        the masked path, which few chunks take, has small tiles, so that it does not need more registers than the plain
        one.
        """

        def tile(size: str, offset: str) -> list[str]:
            start = offset if offset == "0" else f"tl.multiple_of({offset}, {size})"
            if not self.memory.by_block:
                return [f"_i = {start} + tl.arange(0, {size})"]
            return [
                f"_b = ({offset} >> {PER_BLOCK.bit_length() - 1}) + tl.arange(0, {size} // {PER_BLOCK})",
                f"_rows = tl.arange(0, {size} // {PER_BLOCK})[:, None] * {PER_BLOCK}",
                f"_i = {start} + _rows + tl.arange(0, {PER_BLOCK})[None, :]",
            ]

        ahead = {r: [f"_ahead_{name}" for name in self.memory.arrays([r])] for r in self.stage.reads}
        loaded = {r: [f"_loaded_{name}" for name in self.memory.arrays([r])] for r in self.stage.reads}
        load_ahead = [
            f"{word} = {load}"
            for r, words in ahead.items()
            for word, load in zip(words, self.memory.loads(r, self.memory.places(r), ""), strict=True)
        ]
        take = [f"{to} = {word}" for r in ahead for to, word in zip(loaded[r], ahead[r], strict=True)]
        return [
            f"_size = {self.entry('_size')}",
            "if (_first + CHUNK <= _size) & (_together % 16 == 0):",
            *indented(4, [*self.pointers(aligned=True, begin="_first"), *tile("BLOCK", "0"), *load_ahead]),
            "    for _offset in range(0, CHUNK, BLOCK):",
            *indented(8, [*take, "_next = tl.minimum(_offset + BLOCK, CHUNK - BLOCK)"]),
            *indented(8, [*tile("BLOCK", "_next"), *load_ahead, *tile("BLOCK", "_offset")]),
            *indented(8, self.visit(mask="", loaded=loaded)),
            "else:",
            "    _left = tl.minimum(_size - _first, CHUNK).to(tl.int32)",
            *indented(4, self.pointers(aligned=False, begin="_first")),
            "    for _offset in range(0, CHUNK, TAIL):",
            *indented(8, tile("TAIL", "_offset")),
            "        _live = _i < _left",
            *([f"        _live_block = _b * {PER_BLOCK} < _left"] if self.memory.by_block else []),
            *indented(8, self.visit(mask=", mask=_live")),
        ]

    def segments(self) -> list[str]:
        """``FULL``: every segment is a multiple of ``LANES`` long, and there is one at a time. No path then needs
        masks, which take many registers: the fewer, the more warps there are, and the more bytes are on their way."""
        stage, size = self.stage, SEGMENT[self.stage.space]
        geometry = ("_width", "_pieces", "_segments")
        if stage.space == "row":  # the rows of a tensor are one row of rows
            geometry = ("_all_rows", "_row_segments", "_row_segments")
        loop = "for _column in range(0, _longest, LANES):"
        return [
            f"_width = {self.entry(geometry[0])}",
            f"_pieces = {self.entry(geometry[1])}",
            f"_segments = {self.entry(geometry[2])}",
            *([f"_height = {self.entry('_height')}"] if stage.column_values else []),
            "_aligned = (_width % 16 == 0) & (_together % 16 == 0)",
            "_turns = tl.minimum((_segments - _first + ROWS - 1) // ROWS, RUN)",
            "for _turn in range(0, _turns):",
            "    _k = _first + _turn * ROWS + tl.arange(0, ROWS)",
            "    _row = _k",
            "    if ROWS > 1:  # only short rows are handled side by side: each is whole",
            "        _live_row = _k < _segments",
            "        _start = _row * _width",
            "        _longest = _width",
            "    else:",
            "        _live_row = tl.full((1,), True, tl.int1)",
            "        _piece = _width * 0",
            "        if _pieces > 1:  # a 64-bit division takes a hundred instructions",
            "            _row = _k // _pieces",
            f"            _piece = ((_first + _turn) % _pieces) * {size}",
            "        _start = _row * _width + _piece",
            f"        _longest = tl.minimum(_width - _piece, {size}).to(tl.int32)",
            *indented(4, self.rows_and_lanes()),
            "    _plain = _aligned",
            "    if not FULL:",
            "        _plain = _aligned & (_longest % LANES == 0) & (_first + (_turn + 1) * ROWS <= _segments)",
            "    if _plain:",
            *indented(8, self.pointers(aligned=True)),
            "        _start = tl.multiple_of(_start, 16)",
            *indented(8, self.aligned_columns(loop)),
            "    elif FULL:",
            *indented(8, [*self.pointers(aligned=False), loop]),
            *indented(12, [*self.tile("_column", aligned=True), *self.column_values("")]),
            *indented(12, [*self.visit(mask=""), *self.add()]),
            "    else:",
            *indented(8, [*self.pointers(aligned=False), loop]),
            *indented(12, [*self.tile("_column", aligned=False), *self.column_values(", mask=_live, other=0")]),
            *indented(12, self.visit(mask=", mask=_live")),
            *(f"            _term_{s.name} = tl.where(_live, _term_{s.name}, 0.0)" for s in stage.sums),
            *indented(12, self.add()),
            *(
                f"    tl.store(_at__part_{s.name}.to(tl.pointer_type({self.compute})) + _k, "
                f"fold(_lanes_{s.name}, ROWS, LANES, LOG, {s.largest}), mask=_live_row)"
                for s in stage.sums
            ),
        ]

    def aligned_columns(self, loop: str) -> list[str]:
        """``AHEAD``: each tile is loaded while the one before it is updated."""
        here = [*self.tile("tl.multiple_of(_column, LANES)", aligned=True), *self.column_values("")]
        if self.stage.space != "element" or not self.stage.reads:
            return [loop, *indented(4, [*here, *self.visit(mask=""), *self.add()])]
        following = self.tile("tl.multiple_of(_next, LANES)", aligned=True)
        words = {r: self.memory.arrays([r]) for r in self.stage.reads}

        def loads(prefix: str) -> list[str]:
            return [
                f"{prefix}{name} = {load}"
                for r, names in words.items()
                for name, load in zip(names, self.memory.loads(r, self.memory.places(r), ""), strict=True)
            ]

        names = [name for each in words.values() for name in each]
        loaded = {r: [f"_loaded_{name}" for name in each] for r, each in words.items()}
        return [
            "if AHEAD:",
            *indented(4, [*self.tile("0", aligned=True), *loads("_ahead_")]),
            loop,
            "    if AHEAD:",
            *(f"        _loaded_{name} = _ahead_{name}" for name in names),
            "        _next = tl.minimum(_column + LANES, _longest - LANES)",
            *indented(8, [*following, *loads("_ahead_")]),
            *indented(4, here),
            "    if not AHEAD:",
            *indented(8, loads("_loaded_")),
            *indented(4, [*self.visit(mask="", loaded=loaded), *self.add()]),
        ]

    def tile(self, column: str, aligned: bool) -> list[str]:
        """Some columns of some rows; in blocks, if a format has them, along one more dimension."""
        if not self.memory.by_block:
            if aligned:
                return [f"_i = _start[:, None] + {column} + tl.arange(0, LANES)[None, :]"]
            return [
                f"_j = {column} + tl.arange(0, LANES)[None, :]",
                "_i = _start[:, None] + _j",
                "_live = (_j < _longest) & _live_row[:, None]",
            ]
        blocks = f"tl.arange(0, LANES // {PER_BLOCK})"
        lines = [
            f"_c = {column} // {PER_BLOCK} + {blocks}[None, :]",
            f"_j = {column} + {blocks}[None, :, None] * {PER_BLOCK} + tl.arange(0, {PER_BLOCK})[None, None, :]",
            f"_b = _start[:, None] // {PER_BLOCK} + _c",
            "_i = _start[:, None, None] + _j",
        ]
        if not aligned:
            lines += [
                "_live = (_j < _longest) & _live_row[:, None, None]",
                f"_live_block = (_c * {PER_BLOCK} < _longest) & _live_row[:, None]",
            ]
        return lines

    def rows_and_lanes(self) -> list[str]:
        """The values by row of these rows, and lanes for what is summed over them."""
        places = {
            r: {n: f"{pointer} + _row" for n, pointer in self.memory.pointers(r).items()} for r in self.stage.row_values
        }
        mask = ", mask=_live_row, other=0"
        dimensions = "[:, None, None]" if self.memory.by_block else "[:, None]"
        return [
            *(["_shift = (_row - _row // _height) * _width"] if self.stage.column_values else []),
            *(f"{r} = {self.memory.load(r, pointers, mask)}{dimensions}" for r, pointers in places.items()),
            *(f"_lanes_{s.name} = tl.zeros((ROWS, LANES), {self.compute})" for s in self.stage.sums),
        ]

    def column_values(self, mask: str) -> list[str]:
        """The values of each element's column, which is ``_shift`` before it among the columns of all matrices."""
        dimensions = "[:, None, None]" if self.memory.by_block else "[:, None]"
        places = {
            c: {n: f"{pointer} + (_i - _shift{dimensions})" for n, pointer in self.memory.pointers(c).items()}
            for c in self.stage.column_values
        }
        return [f"{c} = {self.memory.load(c, pointers, mask)}" for c, pointers in places.items()]

    def columns(self) -> list[str]:
        """Down a segment of LANES columns, row by row."""
        stage = self.stage
        rows = {r: {n: f"{pointer} + _row" for n, pointer in self.memory.pointers(r).items()} for r in stage.row_values}
        dimensions = "[:, None, None]" if self.memory.by_block else "[:, None]"
        down = [
            f"for _down in range(0, tl.minimum(_height - _top, {COLUMN_SEGMENT})):",
            "    _row = _matrix * _height + _top + _down + tl.arange(0, 1)",
            "    _start = _row * _width + _first_column",
            *(["    _shift = (_row - _matrix) * _width"] if stage.column_values else []),
            *(f"    {r} = {self.memory.load(r, places, '')}{dimensions}" for r, places in rows.items()),
        ]
        return [
            *(f"{name} = {self.entry(name)}" for name in ("_width", "_height", "_column_segments")),
            "_blocks = (_width + LANES - 1) // LANES",
            "_above = _first // _blocks",
            "_first_column = (_first - _above * _blocks) * LANES",
            "_matrix = _above // _column_segments",
            f"_top = (_above - _matrix * _column_segments) * {COLUMN_SEGMENT}",
            "_longest = tl.minimum(_width - _first_column, LANES).to(tl.int32)",
            "_live_row = tl.full((1,), True, tl.int1)",
            *(f"_lanes_{s.name} = tl.zeros((1, LANES), {self.compute})" for s in stage.sums),
            "if (_longest == LANES) & (_width % 16 == 0) & (_together % 16 == 0):",
            *indented(4, [*self.pointers(aligned=True), *down]),
            "        _start = tl.multiple_of(_start, 16)",
            *indented(8, [*self.tile("0", aligned=True), *self.column_values("")]),
            *indented(8, [*self.visit(mask=""), *self.add()]),
            "else:",
            *indented(4, [*self.pointers(aligned=False), *down]),
            *indented(8, [*self.tile("0", aligned=False), *self.column_values(", mask=_live, other=0")]),
            *indented(8, [*self.visit(mask=", mask=_live"), *self.add()]),
            "_j = tl.arange(0, LANES)[None, :]",
            "_place = _above * _width + _first_column + _j",
            *(
                f"tl.store(_at__part_{s.name}.to(tl.pointer_type({self.compute})) + _place, _lanes_{s.name}, "
                "mask=_j < _longest)"
                for s in stage.sums
            ),
        ]

    def add(self) -> list[str]:
        def joined(lanes: str, term: str, largest: bool) -> str:
            return f"{lanes} = maximum({lanes}, {term})" if largest else f"{lanes} = {lanes} + {term}"

        def lanes(term: str) -> str:
            rows = 1 if self.stage.by_columns else "ROWS"
            return f"tl.reshape({term}, ({rows}, LANES))" if self.memory.by_block else term

        return [joined(f"_lanes_{s.name}", lanes(f"_term_{s.name}"), s.largest) for s in self.stage.sums]

    def pointers(self, aligned: bool, begin: str | None = None) -> list[str]:
        """``begin``: the first element of a tile whose indices count from there."""
        plain = {name: raw for r in self.stage.arrays for name, raw in self.memory.pointers(r).items()}
        if begin is not None:
            by_element = self.memory.by_element(self.stage.arrays)
            plain = {
                n: f"{raw} + {begin if n in by_element else f'({begin} // {PER_BLOCK})'}" for n, raw in plain.items()
            }
            return [
                f"_to_{n} = tl.multiple_of({raw}, 16)" if aligned and n in by_element else f"_to_{n} = {raw}"
                for n, raw in plain.items()
            ]
        return [f"_to_{r} = tl.multiple_of({raw}, 16)" if aligned else f"_to_{r} = {raw}" for r, raw in plain.items()]

    def visit(self, mask: str, loaded: Mapping[str, Sequence[str]] | None = None) -> list[str]:
        """A block of elements: load (unless that was done before), update, store."""
        stage, memory = self.stage, self.memory
        places = {r: memory.places(r) for r in stage.arrays}
        other = ", other=0" if mask and stage.sums else ""
        return [
            *(
                f"{r} = {memory.decoded(r, loaded[r]) if loaded else memory.load(r, places[r], mask + other)}"
                for r in stage.reads
            ),
            *(["grad = divide(grad, _scale)"] if self.scaled and "grad" in stage.reads else []),
            f"{self.results()} = update({', '.join(self.arguments())})",
            *self.noise(),
            *(line for r in stage.writes for line in memory.store(r, places[r], f"_new_{r}", mask)),
            *(self.unscaled(memory.store("grad", places["grad"], "grad", mask)) if memory.stores_grad else []),
        ]

    def unscaled(self, store: list[str]) -> list[str]:
        """The scale is 1 where a GradScaler has only looked for infinities: then there is nothing to write."""
        return ["if _scale != 1:", *indented(4, store)] if self.scaled else []

    def arguments(self) -> list[str]:
        stage = self.stage
        return [*stage.reads, *stage.row_values, *stage.column_values, *stage.scalars]

    def results(self) -> str:
        names = [*(f"_new_{r}" for r in self.stage.writes), *(f"_term_{s.name}" for s in self.stage.sums)]
        return ", ".join(names) + "," * (len(names) == 1)
