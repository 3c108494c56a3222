"""How a Triton kernel loads and stores a role in its format, as source text."""

from __future__ import annotations

from collections.abc import Mapping

from fusedadam.backends import codecs
from fusedadam.rules.stages import Stage
from fusedadam.tensors.formats import Format

TYPES = {"f32": "tl.float32", "f16": "tl.float16", "bf16": "tl.bfloat16", "f64": "tl.float64"}


class LoadStore(codecs.StageFormats):
    def __init__(self, stage: Stage, formats: Mapping[str, str], compute: str, interpreted: bool) -> None:
        super().__init__(stage, formats, compute, "interpreter" if interpreted else "triton")

    def functions(self) -> list[str]:
        """The codecs, and ``_stored_ROLE(x)``."""
        texts = codecs.functions(tuple(self.formats.values()), self.backend, self.compute, codecs.WithOperators)
        return self.with_round_trips(texts, lambda fmt: f"{self._narrowed(fmt, 'x')}.to({TYPES[self.compute]})")

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
