"""Triton kernels that go straight through memory, as source text: each element by itself, without rows and sums."""

from __future__ import annotations

from fusedadam.backends.triton.writer import ArrayWriter
from fusedadam.codegen import indented
from fusedadam.formats.noise import SPREAD
from fusedadam.tensors.layout import PER_BLOCK


class Straight(ArrayWriter):
    shapes = "CHUNK, BLOCK"

    def chunk(self) -> list[str]:
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


class Busy(ArrayWriter):
    """For formats that keep a processor busy. If one has blocks, each row of a tile is a block.

    Indices are 32-bit, from the chunk's first element on; a tile is loaded while the one before it is updated; and the
    masked path, which few chunks take, has small tiles, so that it does not need more registers than the plain one.
    """

    shapes = "CHUNK, BLOCK, TAIL"
    index = "_first + _i"

    def chunk(self) -> list[str]:
        ahead = self.loads("_ahead_")
        names = self.memory.arrays(self.stage.reads)
        return [
            f"_size = {self.entry('_size')}",
            "if (_first + CHUNK <= _size) & (_together % 16 == 0):",
            *indented(4, [*self.pointers(aligned=True), *self.tile("BLOCK", "0"), *ahead]),
            "    for _offset in range(0, CHUNK, BLOCK):",
            *(f"        _loaded_{name} = _ahead_{name}" for name in names),
            "        _next = tl.minimum(_offset + BLOCK, CHUNK - BLOCK)",
            *indented(8, [*self.tile("BLOCK", "_next"), *ahead, *self.tile("BLOCK", "_offset")]),
            *indented(8, self.visit(mask="", loaded="_loaded_")),
            "else:",
            "    _left = tl.minimum(_size - _first, CHUNK).to(tl.int32)",
            *indented(4, self.pointers(aligned=False)),
            "    for _offset in range(0, CHUNK, TAIL):",
            *indented(8, self.tile("TAIL", "_offset")),
            "        _live = _i < _left",
            *([f"        _live_block = _b * {PER_BLOCK} < _left"] if self.memory.by_block else []),
            *indented(8, self.visit(mask=", mask=_live")),
        ]

    def tile(self, size: str, offset: str) -> list[str]:
        start = offset if offset == "0" else f"tl.multiple_of({offset}, {size})"
        if not self.memory.by_block:
            return [f"_i = {start} + tl.arange(0, {size})"]
        return [
            f"_b = ({offset} >> {PER_BLOCK.bit_length() - 1}) + tl.arange(0, {size} // {PER_BLOCK})",
            f"_rows = tl.arange(0, {size} // {PER_BLOCK})[:, None] * {PER_BLOCK}",
            f"_i = {start} + _rows + tl.arange(0, {PER_BLOCK})[None, :]",
        ]

    def pointers(self, aligned: bool) -> list[str]:
        """Of each array, to the chunk's first element, or to its block."""
        lines = []
        for role in self.stage.arrays:
            arrays = self.memory.formats[role].arrays_of(role)
            for name, raw in self.memory.pointers(role).items():
                by_block = arrays[name].by == "block"
                first = f"{raw} + (_first // {PER_BLOCK})" if by_block else f"{raw} + _first"
                is_aligned = aligned and not by_block
                lines.append(f"_to_{name} = tl.multiple_of({first}, 16)" if is_aligned else f"_to_{name} = {first}")
        return lines

    def noise(self) -> list[str]:
        if not self.memory.is_stochastic or "_extent1" in self.fields:
            return super().noise()
        # one operation for each element: the rest is the same for all of them
        return [f"_hash = _mixed(_i * ({SPREAD}) + ((_index + _first).to(tl.int32) * ({SPREAD}) + _key))"]
