"""How a Numba kernel loads and stores a role in its format, as source text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusedadam.formats import FORMATS, Format, codecs
from fusedadam.rules.stages import Stage


class LoadStore(codecs.StageFormats):
    def __init__(self, stage: Stage, formats: Mapping[str, str], compute: str, roles: Sequence[str] = ()) -> None:
        super().__init__(stage, formats, compute, "numba", roles)
        inputs = {formats[role] for role in stage.reads}
        self.sole_format = FORMATS[inputs.pop()] if len(inputs) == 1 else None  # of all inputs

    def head(self) -> list[str]:
        """Functions on memory: floats as the hardware converts them, or words."""
        lines = [f'scalar = load("f64", "{self.compute}")', f'_store_part = store("{self.compute}", "{self.compute}")']
        for fmt in self.formats.values():
            if not fmt.is_native("numba"):
                for array in fmt.arrays:
                    lines.append(f'_load_{array.word} = load("{array.word}", "int32")')
                    lines.append(f'_store_{array.word} = store("{array.word}", "int32")')
                continue
            lines.append(f'_load_{fmt.name} = load("{fmt.name}", "{self.compute}")')
            lines.append(f'_store_{fmt.name} = store("{fmt.name}", "{self._input_type(fmt)}")')
        for r in self.round_trips:
            if (fmt := self.formats[r]).is_native("numba"):
                lines.append(
                    f'_there_and_back_{fmt.name} = stored("{fmt.name}", "{self._input_type(fmt)}", "{self.compute}")'
                )
        return list(dict.fromkeys(lines))

    def functions(self) -> list[str]:
        """The codecs, and ``_stored_ROLE(x)``."""
        texts = self.codec_functions(codecs.WithCalls, self.sole_format)
        return self.with_round_trips(texts, lambda fmt: f"_there_and_back_{fmt.name}({self.rounded(fmt, 'x')})")

    def load(self, name: str, index: str) -> str:
        """``index``: the element's; words by block were widened to one for each element before."""
        fmt = self.formats[name]
        if fmt.is_native("numba"):
            return f"_load_{fmt.name}(_at_{name}, {index})"
        words = (
            f"_load_{array.word}(_at_{n}, {index})" if array.by == "element" else f"_word_at(_wide_{n}, _j)"
            for n, array in fmt.arrays_of(name).items()
        )
        return f"_decode_{fmt.name}({', '.join(words)})"

    def store(self, name: str, index: str, value: str) -> list[str]:
        fmt = self.formats[name]
        if fmt.is_native("numba"):
            return [f"_store_{fmt.name}(_at_{name}, {index}, {self.rounded(fmt, value)})"]
        noise = self.noise_argument(
            name, lambda half: f"integer({half})", lambda word, by: f"multiply({word}, integer({by}))"
        )
        if fmt.by_block:
            return [
                f"_put_word(_measured_{name}, _j, _measure_{fmt.name}({value}{noise}))",
                f"_put_float(_float_{name}, _j, {value if self.compute == 'f32' else f'narrow({value})'})",
            ]
        arrays = fmt.arrays_of(name)
        return [
            f"{', '.join(f'_word_{n}' for n in arrays)} = _encode_{fmt.name}({value}{noise})",
            *(f"_store_{array.word}(_at_{n}, {index}, _word_{n})" for n, array in arrays.items()),
        ]

    def widened(self, name: str) -> list[str]:
        """Before the elements of some blocks are visited: the word of each block, once for each element."""
        *_, (by_block, array) = self.formats[name].arrays_of(name).items()
        return [
            "for _b in range(_blocks):",
            f"    _word = _load_{array.word}(_at_{by_block}, _first_block + _b)",
            "    for _j in range(_b * _per_block, (_b + 1) * _per_block):",
            f"        _put_word(_wide_{by_block}, _j, _word)",
        ]

    def stored_by_block(self, name: str) -> list[str]:
        """After they have been visited: what was measured is encoded, block by block."""
        fmt, (codes, by_block) = self.formats[name], self.formats[name].array_names(name)
        return [
            "for _b in range(_blocks):",
            f"    _word = _of_block_{fmt.name}(largest_word(_measured_{name}, _b * _per_block, _per_block, _word_at))",
            f"    _store_{fmt.arrays[1].word}(_at_{by_block}, _first_block + _b, _word)",
            "    for _j in range(_b * _per_block, (_b + 1) * _per_block):",
            f"        _code = _encode_{fmt.name}(_word_at(_measured_{name}, _j), _word, _float_at(_float_{name}, _j))",
            f"        _store_{fmt.arrays[0].word}(_at_{codes}, _begin + _j, _code)",
        ]

    def _input_type(self, fmt: Format) -> str:
        """The type of what the hardware converts to this format."""
        return self.compute if self.rounded(fmt, "x") == "x" else "f32"
