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
        texts = self.codec_functions(codecs.WithOperators)
        return self.with_round_trips(texts, lambda fmt: f"{self._narrowed(fmt, 'x')}.to({TYPES[self.compute]})")

    def pointers(self, name: str) -> dict[str, str]:
        """The arrays of a role, and their addresses ``_at_ARRAY`` as pointers."""
        fmt = self.formats[name]
        native = fmt.is_native(self.backend)
        types = [TYPES[fmt.name]] if native else [f"tl.{array.word}" for array in fmt.arrays]
        arrays = zip(fmt.array_names(name), types, strict=True)
        return {n: f"_at_{n}.to(tl.pointer_type({kind}))" for n, kind in arrays}

    def load(self, name: str, pointers: Mapping[str, str], mask: str) -> str:
        """``pointers``: to the elements of each array of a role."""
        fmt = self.formats[name]
        loads = [f"tl.load({pointer}{mask})" for pointer in pointers.values()]
        if fmt.is_native(self.backend):
            return f"{loads[0]}.to({TYPES[self.compute]})"
        return f"_decode_{fmt.name}({', '.join(f'{load}.to(tl.int32)' for load in loads)})"

    def store(self, name: str, pointers: Mapping[str, str], value: str, mask: str) -> list[str]:
        fmt = self.formats[name]
        if fmt.is_native(self.backend):
            (pointer,) = pointers.values()
            return [f"tl.store({pointer}, {self._narrowed(fmt, value)}{mask})"]
        words = {f"_word_{n}": array.word for n, array in zip(pointers, fmt.arrays, strict=True)}
        return [
            f"{', '.join(words)} = _encode_{fmt.name}({value})",
            *(
                f"tl.store({pointer}, {word}.to(tl.{kind}){mask})"
                for pointer, (word, kind) in zip(pointers.values(), words.items(), strict=True)
            ),
        ]

    def _narrowed(self, fmt: Format, x: str) -> str:
        return f"{self.rounded(fmt, x)}.to({TYPES[fmt.name]})"
