"""How a Numba kernel loads and stores a role in its format, as source text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fusedadam.backends import codecs
from fusedadam.rules.stages import Stage
from fusedadam.tensors.formats import FORMATS, Format


class LoadStore:
    """The formats of everything that a stage reads, writes or rounds as if it were stored."""

    def __init__(self, stage: Stage, storage: Mapping[str, str], compute: str) -> None:
        self.compute = compute
        self.round_trips = [r for r in storage if f"_stored_{r}(" in stage.functions[-1]]
        names = dict.fromkeys((*stage.reads, *stage.rows, *stage.writes, *self.round_trips))
        self.formats = {name: FORMATS[storage[name]] for name in names}
        inputs = {storage[r] for r in stage.reads}
        self.own = FORMATS[inputs.pop()] if len(inputs) == 1 else None

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
        """The codecs, and ``_stored_ROLE(x)``: what comes back when it is stored and loaded."""
        formats = tuple(self.formats.values())
        texts = codecs.functions(formats, "numba", self.compute, codecs.WithCalls, self.own)
        for r in self.round_trips:
            one = self.formats[r]
            words = ", ".join(f"_word_{name}" for name in one.array_names(r))
            lines = (
                [f"return _there_and_back_{one.name}({self._rounded(one, 'x')})"]
                if one.is_native("numba")
                else [f"{words} = _encode_{one.name}(x)", f"return _decode_{one.name}({words})"]
            )
            texts = [*texts, "\n    ".join([f"def _stored_{r}(x):", *lines])]
        return texts

    def arrays(self, names: Iterable[str]) -> list[str]:
        """The arrays that these are kept in, which are rows of the table."""
        return [own for name in names for own in self.formats[name].array_names(name)]

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
