"""How a Triton kernel loads and stores a role in its format, as source text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fusedadam.backends import codecs
from fusedadam.rules.stages import Stage
from fusedadam.tensors.formats import FORMATS, Format

TYPES = {"f32": "tl.float32", "f16": "tl.float16", "bf16": "tl.bfloat16", "f64": "tl.float64"}


class LoadStore:
    """The formats of everything that a stage reads, writes or rounds as if it were stored."""

    def __init__(self, stage: Stage, storage: Mapping[str, str], compute: str, interpreted: bool) -> None:
        self.compute, self.backend = compute, "interpreter" if interpreted else "triton"
        self.round_trips = [r for r in storage if f"_stored_{r}(" in stage.functions[-1]]
        names = dict.fromkeys((*stage.reads, *stage.rows, *stage.writes, *self.round_trips))
        self.formats = {name: FORMATS[storage[name]] for name in names}

    def functions(self) -> list[str]:
        """The codecs, and ``_stored_ROLE(x)``: what comes back when it is stored and loaded."""
        texts = codecs.functions(tuple(self.formats.values()), self.backend, self.compute, codecs.WithOperators)
        for r in self.round_trips:
            one = self.formats[r]
            words = ", ".join(f"_word_{name}" for name in one.array_names(r))
            lines = (
                [f"return {self._narrowed(one, 'x')}.to({TYPES[self.compute]})"]
                if one.is_native(self.backend)
                else [f"{words} = _encode_{one.name}(x)", f"return _decode_{one.name}({words})"]
            )
            texts = [*texts, "\n    ".join([f"def _stored_{r}(x):", *lines])]
        return texts

    def arrays(self, names: Iterable[str]) -> list[str]:
        """The arrays that these are kept in, which are rows of the table."""
        return [own for name in names for own in self.formats[name].array_names(name)]

    def pointers(self, name: str) -> dict[str, str]:
        """The arrays of a role, and their addresses ``_at_ARRAY`` as pointers."""
        one = self.formats[name]
        native = one.is_native(self.backend)
        types = [TYPES[one.name]] if native else [f"tl.{array.word}" for array in one.arrays]
        return {own: f"_at_{own}.to(tl.pointer_type({k}))" for own, k in zip(one.array_names(name), types, strict=True)}

    def load(self, name: str, pointers: Mapping[str, str], mask: str) -> str:
        """``pointers``: to the elements of each array of a role."""
        one = self.formats[name]
        loads = [f"tl.load({pointer}{mask})" for pointer in pointers.values()]
        if one.is_native(self.backend):
            return f"{loads[0]}.to({TYPES[self.compute]})"
        return f"_decode_{one.name}({', '.join(f'{load}.to(tl.int32)' for load in loads)})"

    def store(self, name: str, pointers: Mapping[str, str], value: str, mask: str) -> list[str]:
        one = self.formats[name]
        if one.is_native(self.backend):
            (pointer,) = pointers.values()
            return [f"tl.store({pointer}, {self._narrowed(one, value)}{mask})"]
        words = {f"_word_{own}": array.word for own, array in zip(pointers, one.arrays, strict=True)}
        return [
            f"{', '.join(words)} = _encode_{one.name}({value})",
            *(
                f"tl.store({pointer}, {word}.to(tl.{kind}){mask})"
                for pointer, (word, kind) in zip(pointers.values(), words.items(), strict=True)
            ),
        ]

    def _narrowed(self, one: Format, x: str) -> str:
        return f"{codecs.rounded(one, self.backend, self.compute, x)}.to({TYPES[one.name]})"
