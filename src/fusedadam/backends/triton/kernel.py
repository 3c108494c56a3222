"""The Triton kernels of a rule's stages, as source text: one program a chunk, for all tensors of a launch.

A chunk that is full and whose tensors are aligned takes the plain path, whose loads and stores the compiler makes
16 bytes wide; every other chunk takes the masked one. Where rows matter or terms are summed, a chunk is some segments
of rows, side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusedadam.backends.triton.load_store import LoadStore
from fusedadam.backends.triton.segments import Columns, Segments
from fusedadam.backends.triton.straight import Busy, Straight
from fusedadam.backends.triton.writer import Writer
from fusedadam.rules.stages import Stage


def source(
    title: str, stage: Stage, fields: Mapping[str, int], storage: Mapping[str, str], compute: str, scaled: bool,
    interpreted: bool, roles: Sequence[str] = (), looped: bool = False,
) -> str:  # fmt: skip
    """``fields``: the table's; ``storage``: the formats of roles; ``scaled``: with AMP's scale and infinities:
    gradients are divided by the scale, and the last visit that reads them stores them so; ``roles``: all that the rule
    has; ``looped``: a few programs visit all chunks, and leave the rest of the device to the model."""
    kept = ", ".join(f"{r} {storage[r]}" for r in stage.arrays)
    title = f"# {title}, {stage.space}s: {kept}, computed in {compute}"
    memory = LoadStore(stage, storage, compute, interpreted, roles)
    return "\n".join([title, *_writer(stage, memory)(stage, fields, memory, scaled, looped).lines(), ""])


def _writer(stage: Stage, memory: LoadStore) -> type[Writer]:
    if stage.space == "tensor":
        return Tensors
    if stage.by_columns:
        return Columns
    if stage.in_segments:
        return Segments
    return Busy if memory.is_busy else Straight


class Tensors(Writer):
    """A stage over tensors: some of them at a time, with one value each."""

    shapes = "BLOCK"

    def body(self) -> list[str]:
        stage, memory = self.stage, self.memory
        states = [name for name in stage.arrays if name in memory.roles]
        places = {name: f"numbers + {self.fields[name]} * tensors + _t" for name in stage.arrays}

        def load(name: str) -> str:
            if name in states:
                return memory.load(name, memory.pointers(name), ", mask=_live, other=0")
            return f"tl.load({places[name]}, mask=_live, other=0)"

        def store(name: str) -> list[str]:
            if name in states:
                return memory.store(name, memory.pointers(name), f"_new_{name}", ", mask=_live")
            return [f"tl.store({places[name]}, _new_{name}, mask=_live)"]

        return [
            "_t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
            "_live = _t < tensors",
            *(f"_at_{s} = tl.load(table + {self.fields[s]} * tensors + _t, mask=_live, other=0)" for s in states),
            *(f"{name} = {load(name)}" for name in stage.reads),
            f"{stage.results} = update({', '.join(stage.reads)})",
            *(line for name in stage.writes for line in store(name)),
        ]
