"""Triton kernels that know rows, as source text: segments of rows side by side, or down some columns."""

from __future__ import annotations

from fusedadam.backends.triton.writer import ArrayWriter
from fusedadam.codegen import indented
from fusedadam.rules.sums import COLUMN_SEGMENT, SEGMENT
from fusedadam.tensors.layout import PER_BLOCK


class RowWriter(ArrayWriter):
    """Tiles of some rows, each with some lanes: values by row and column are loaded, and terms are added to lanes."""

    rows = "ROWS"  # of a tile

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

    @property
    def by_row(self) -> str:
        """Makes a value for each row one for each element of a tile."""
        return "[:, None, None]" if self.memory.by_block else "[:, None]"

    def row_values(self, mask: str) -> list[str]:
        places = {
            r: {n: f"{pointer} + _row" for n, pointer in self.memory.pointers(r).items()} for r in self.stage.row_values
        }
        return [f"{r} = {self.memory.load(r, pointers, mask)}{self.by_row}" for r, pointers in places.items()]

    def column_values(self, mask: str) -> list[str]:
        """The values of each element's column, which is ``_shift`` before it among the columns of all matrices."""
        places = {
            c: {n: f"{pointer} + (_i - _shift{self.by_row})" for n, pointer in self.memory.pointers(c).items()}
            for c in self.stage.column_values
        }
        return [f"{c} = {self.memory.load(c, pointers, mask)}" for c, pointers in places.items()]

    def empty_lanes(self) -> list[str]:
        return [f"_lanes_{s.name} = tl.zeros(({self.rows}, LANES), {self.compute})" for s in self.stage.sums]

    def add(self) -> list[str]:
        lines = []
        for s in self.stage.sums:
            lanes, term = f"_lanes_{s.name}", f"_term_{s.name}"
            if self.memory.by_block:
                term = f"tl.reshape({term}, ({self.rows}, LANES))"
            lines.append(f"{lanes} = maximum({lanes}, {term})" if s.largest else f"{lanes} = {lanes} + {term}")
        return lines


class Segments(RowWriter):
    shapes = "ROWS, LANES, LOG, RUN, FULL, AHEAD"

    def chunk(self) -> list[str]:
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
            *(["    _shift = (_row - _row // _height) * _width"] if stage.column_values else []),
            *indented(4, [*self.row_values(", mask=_live_row, other=0"), *self.empty_lanes()]),
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
        return [
            "if AHEAD:",
            *indented(4, [*self.tile("0", aligned=True), *self.loads("_ahead_")]),
            loop,
            "    if AHEAD:",
            *(f"        _loaded_{name} = _ahead_{name}" for name in self.memory.arrays(self.stage.reads)),
            "        _next = tl.minimum(_column + LANES, _longest - LANES)",
            *indented(8, [*self.tile("tl.multiple_of(_next, LANES)", aligned=True), *self.loads("_ahead_")]),
            *indented(4, here),
            "    if not AHEAD:",
            *indented(8, self.loads("_loaded_")),
            *indented(4, [*self.visit(mask="", loaded="_loaded_"), *self.add()]),
        ]


class Columns(RowWriter):
    """Down a segment of LANES columns, row by row."""

    shapes = "LANES"
    rows = "1"

    def chunk(self) -> list[str]:
        stage = self.stage
        down = [
            f"for _down in range(0, tl.minimum(_height - _top, {COLUMN_SEGMENT})):",
            "    _row = _matrix * _height + _top + _down + tl.arange(0, 1)",
            "    _start = _row * _width + _first_column",
            *(["    _shift = (_row - _matrix) * _width"] if stage.column_values else []),
            *indented(4, self.row_values("")),
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
            *self.empty_lanes(),
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
