"""How a Numba kernel loads and stores a role in its format, as source text."""

from __future__ import annotations

from collections.abc import Mapping

from fusedadam.backends import codecs
from fusedadam.rules.stages import Stage
from fusedadam.tensors.formats import FORMATS, Format


class LoadStore(codecs.StageFormats):
    def __init__(self, stage: Stage, formats: Mapping[str, str], compute: str) -> None:
        super().__init__(stage, formats, compute, "numba")
        inputs = {formats[role] for role in stage.reads}
        self.own = FORMATS[inputs.pop()] if len(inputs) == 1 else None  # the one format of all inputs

    def head(self) -> list[str]:
        """Functions on memory: floats as the hardware converts them, or words."""
        lines = [f'scalar = load("f64", "{self.compute}")', f'_store_part = store("{self.compute}", "{self.compute}")']
        for one in self.formats.values():
            if not one.is_native("numba"):
                for array in one.arrays:
                    lines.append(f'_load_{array.word} = load("{array.word}", "int32")')
                    lines.append(f'_store_{array.word} = store("{array.word}", "int32")')
                continue
            lines.append(f'_load_{one.name} = load("{one.name}", "{self.compute}")')
            lines.append(f'_store_{one.name} = store("{one.name}", "{self._given(one)}")')
        for r in self.round_trips:
            if (one := self.formats[r]).is_native("numba"):
                lines.append(
                    f'_there_and_back_{one.name} = stored("{one.name}", "{self._given(one)}", "{self.compute}")'
                )
        return list(dict.fromkeys(lines))

    def functions(self) -> list[str]:
        """The codecs, and ``_stored_ROLE(x)``."""
        formats = tuple(self.formats.values())
        texts = codecs.functions(formats, "numba", self.compute, codecs.WithCalls, self.own)
        return self.with_round_trips(texts, lambda fmt: f"_there_and_back_{fmt.name}({self._rounded(fmt, 'x')})")

    def load(self, name: str, index: str) -> str:
        one = self.formats[name]
        if one.is_native("numba"):
            return f"_load_{one.name}(_at_{name}, {index})"
        arrays = zip(one.arrays, one.array_names(name), strict=True)
        return f"_decode_{one.name}({', '.join(f'_load_{array.word}(_at_{own}, {index})' for array, own in arrays)})"

    def store(self, name: str, index: str, value: str) -> list[str]:
        one = self.formats[name]
        if one.is_native("numba"):
            return [f"_store_{one.name}(_at_{name}, {index}, {self._rounded(one, value)})"]
        arrays = dict(zip(one.array_names(name), one.arrays, strict=True))
        return [
            f"{', '.join(f'_word_{own}' for own in arrays)} = _encode_{one.name}({value})",
            *(f"_store_{array.word}(_at_{own}, {index}, _word_{own})" for own, array in arrays.items()),
        ]

    def _rounded(self, one: Format, x: str) -> str:
        return codecs.rounded(one, "numba", self.compute, x)

    def _given(self, one: Format) -> str:
        """The type of what the hardware converts to this format."""
        return self.compute if self._rounded(one, "x") == "x" else "f32"
