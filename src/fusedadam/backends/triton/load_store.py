"""How a Triton kernel loads and stores a role in its format, as source text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusedadam.formats import Format, codecs
from fusedadam.rules.stages import Stage

TYPES = {"f32": "tl.float32", "f16": "tl.float16", "bf16": "tl.bfloat16", "f64": "tl.float64"}


class LoadStore(codecs.StageFormats):
    def __init__(
        self, stage: Stage, formats: Mapping[str, str], compute: str, interpreted: bool, roles: Sequence[str] = ()
    ) -> None:
        super().__init__(stage, formats, compute, "interpreter" if interpreted else "triton", roles)

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

    def places(self, name: str) -> dict[str, str]:
        """The pointers ``_to_ARRAY`` of a role to the elements, or blocks, that are visited."""
        index = {"element": "_i", "block": "_b"}
        return {n: f"_to_{n} + {index[array.by]}" for n, array in self.formats[name].arrays_of(name).items()}

    def load(self, name: str, pointers: Mapping[str, str], mask: str) -> str:
        """``pointers``: to the elements of each array of a role."""
        return self.decoded(name, [*self.loads(name, pointers, mask).values()])

    def loads(self, name: str, pointers: Mapping[str, str], mask: str) -> dict[str, str]:
        """What is in each array of a role."""
        masks = zip(pointers, _masks(self.formats[name], mask), strict=True)
        return {array: f"tl.load({pointers[array]}{each})" for array, each in masks}

    def decoded(self, name: str, loaded: Sequence[str]) -> str:
        fmt = self.formats[name]
        if fmt.is_native(self.backend):
            return f"{loaded[0]}.to({TYPES[self.compute]})"
        words = [f"{word}.to(tl.int32)" for word in loaded]
        if fmt.by_block:  # the last dimension of a tile is a block
            words[-1] = f"tl.expand_dims({words[-1]}, -1)"
        return f"_decode_{fmt.name}({', '.join(words)})"

    def store(self, name: str, pointers: Mapping[str, str], value: str, mask: str) -> list[str]:
        fmt = self.formats[name]
        if fmt.is_native(self.backend):
            (pointer,) = pointers.values()
            return [f"tl.store({pointer}, {self._narrowed(fmt, value)}{mask})"]
        noise = self.noise_argument(name, str, lambda word, by: f"{word} * ({by})")
        words = {f"_word_{n}": array.word for n, array in zip(pointers, fmt.arrays, strict=True)}
        encoded = [f"{', '.join(words)} = _encode_{fmt.name}({value}{noise})"]
        if fmt.by_block:
            code, by_block = words
            encoded = [
                f"_measured = _measure_{fmt.name}({value}{noise})",
                f"{by_block} = _of_block_{fmt.name}(largest_word(_measured))",
                f"{code} = _encode_{fmt.name}(_measured, tl.expand_dims({by_block}, -1), {value})",
            ]
        stores = zip(pointers.values(), words.items(), _masks(fmt, mask), strict=True)
        return [*encoded, *(f"tl.store({pointer}, {word}.to(tl.{kind}){m})" for pointer, (word, kind), m in stores)]

    def _narrowed(self, fmt: Format, x: str) -> str:
        return f"{self.rounded(fmt, x)}.to({TYPES[fmt.name]})"


def _masks(fmt: Format, mask: str) -> list[str]:
    """For each array of a format."""
    return [mask if array.by == "element" else mask.replace("_live", "_live_block") for array in fmt.arrays]
