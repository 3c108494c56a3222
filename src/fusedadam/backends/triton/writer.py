"""What every Triton kernel of a stage has in common, as source text: its head, and the visit of a tile of elements."""

from __future__ import annotations

from collections.abc import Mapping

from fusedadam.backends.triton.load_store import TYPES, LoadStore
from fusedadam.codegen import indented
from fusedadam.formats.noise import SPREAD
from fusedadam.rules.positions import START
from fusedadam.rules.stages import Stage
from fusedadam.tensors.shards import INDEX_FIELDS

ARGUMENTS = "table, numbers, tensors, chunk_tensor, chunk_first, grad_scale, found_inf"


class Writer:
    """Writes the kernel of a stage. ``fields``: the table's; ``scaled``: with AMP's scale and infinities;
    ``looped``: each program visits one chunk after another."""

    shapes: str  # the constants that a launch gives besides the arguments

    def __init__(
        self, stage: Stage, fields: Mapping[str, int], memory: LoadStore, scaled: bool, looped: bool = False
    ) -> None:
        self.stage, self.fields, self.memory, self.looped = stage, fields, memory, looped
        self.scaled = scaled and stage.space == "element"
        self.stops_at_inf = scaled and (stage.space == "element" or any(name in memory.roles for name in stage.writes))
        self.compute = TYPES[memory.compute]

    def body(self) -> list[str]:
        raise NotImplementedError

    def lines(self) -> list[str]:
        functions = self.memory.functions()
        suffix = "64" if self.memory.compute == "f64" else ""
        ops = ["abs", "fold", "maximum", "minimum", "power", "where"]
        ops += [f"{op}{suffix} as {op}" for op in ("divide", "number", "sqrt")]
        ops += ["bits_of_float", "float_of_bits", "narrow", "widen"] if functions else []
        ops += ["largest_word"] if self.memory.written_by_block else []
        ops += ["index_of"] if self.memory.is_stochastic and "_extent1" in self.fields else []
        constants = [f"{name}: tl.constexpr" for name in self.shapes.split(", ")]
        return [
            "import triton",
            "import triton.language as tl",
            f"from fusedadam.backends.triton.ops import {', '.join(ops)}",
            "",
            *(f"\n@triton.jit\n{function}\n" for function in (*functions, *self.stage.functions)),
            "",
            '@triton.jit(do_not_specialize=["tensors", "chunks"])'
            if self.looped
            else '@triton.jit(do_not_specialize=["tensors"])',
            f"def run({', '.join([ARGUMENTS, *['chunks'] * self.looped, *constants])}):",
            *(["    if tl.load(found_inf) != 0:", "        return"] if self.stops_at_inf else []),
            *indented(4, self.body()),
        ]


class ArrayWriter(Writer):
    """For a stage over elements, rows or columns: one program a chunk, which ``chunk`` visits tile by tile."""

    index = "_i"  # of each element of a tile, in its tensor

    def chunk(self) -> list[str]:
        raise NotImplementedError

    def body(self) -> list[str]:
        stage = self.stage
        # backwards, if this is not the first visit: what was visited last is still in the cache
        chunk = "tl.num_programs(0) - 1 - tl.program_id(0)" if stage.position > START else "tl.program_id(0)"
        scale = [f"_scale = tl.load(grad_scale).to({self.compute})"] if self.scaled else []
        if self.looped:
            loop = "for _chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):"
            return [*scale, loop, *indented(4, self.one_chunk())]
        return [*scale, f"_chunk = {chunk}", *self.one_chunk()]

    def one_chunk(self) -> list[str]:
        stage, arrays = self.stage, self.memory.arrays(self.stage.arrays)
        return [
            "_t = tl.load(chunk_tensor + _chunk)",
            "_first = tl.load(chunk_first + _chunk)",
            *(f"_at_{name} = {self.entry(name)}" for name in (*arrays, *(f"_part_{s.name}" for s in stage.sums))),
            *(f"_at_{name} = {self.entry(f'_here_{name}')}" for name in stage.row_values),
            *(f"_at_{name} = {self.entry(name)}" for name in stage.column_values),
            *(f"{s} = {self.entry(s, 'numbers')}.to({self.compute})" for s in stage.scalars),
            *self.keys(),
            f"_together = {' | '.join(f'_at_{name}' for name in arrays)}",
            *self.chunk(),
        ]

    def entry(self, name: str, table: str = "table") -> str:
        return f"tl.load({table} + {self.fields[name]} * tensors + _t)"

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
        index = self.index
        if "_extent1" in self.fields:
            index = f"index_of({index}, _extent1, _extent2, _jump1, _jump2, _jump3)"
        return [f"_hash = _mixed((_index + {index}).to(tl.int32) * ({SPREAD}) + _key)"]

    def pointers(self, aligned: bool) -> list[str]:
        """Of each array, to the element whose index is 0."""
        return [
            f"_to_{name} = tl.multiple_of({raw}, 16)" if aligned else f"_to_{name} = {raw}"
            for r in self.stage.arrays
            for name, raw in self.memory.pointers(r).items()
        ]

    def loads(self, prefix: str) -> list[str]:
        """The words of a tile, as they are in memory."""
        return [
            f"{prefix}{name} = {load}"
            for r in self.stage.reads
            for name, load in self.memory.loads(r, self.memory.places(r), mask="").items()
        ]

    def visit(self, mask: str, loaded: str | None = None) -> list[str]:
        """A tile: load (unless that was done before, into names with the prefix ``loaded``), update, store."""
        stage, memory = self.stage, self.memory
        places = {r: memory.places(r) for r in stage.arrays}
        other = ", other=0" if mask and stage.sums else ""

        def read(r: str) -> str:
            if loaded is not None:
                return memory.decoded(r, [loaded + name for name in memory.arrays([r])])
            return memory.load(r, places[r], mask + other)

        unscaled = []
        if self.scaled and memory.stores_grad:
            # where a GradScaler has only looked for infinities, the scale is 1 and there is nothing to write
            unscaled = ["if _scale != 1:", *indented(4, memory.store("grad", places["grad"], "grad", mask))]
        return [
            *(f"{r} = {read(r)}" for r in stage.reads),
            *(["grad = divide(grad, _scale)"] if self.scaled and "grad" in stage.reads else []),
            f"{stage.results} = update({', '.join(stage.arguments)})",
            *self.noise(),
            *(line for r in stage.writes for line in memory.store(r, places[r], f"_new_{r}", mask)),
            *unscaled,
        ]
