"""What a format is: the arrays that hold a role's values, and a codec, which is a few plain functions on words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import abs as abs  # noqa: A004

from fusedadam.tensors.layout import PER_BLOCK

Word: TypeAlias = Any  # signed 32-bit integers
Float: TypeAlias = Any  # float32; float64 where it says so


def bits_of_float(x: Float) -> Word:
    return x.view(torch.int32)


def float_of_bits(bits: Word) -> Float:
    return bits.view(torch.float32)


def where(condition: Any, x: Any, y: Any) -> Any:
    if isinstance(x, int) and isinstance(y, int):  # torch would take two constants for 64-bit integers
        return torch.where(condition, x, y).to(torch.int32)
    return torch.where(condition, x, y)


def narrow(x: Float) -> Float:
    """float64 to float32, to nearest even."""
    return x.float()


def widen(x: Float) -> Float:
    """float32 to float64."""
    return x.double()


# what a codec may call; backends bind functions of the same names
_OPS: tuple[Callable[..., Any], ...] = (abs, bits_of_float, float_of_bits, narrow, where, widen)
OPS = {op.__name__: op for op in _OPS}


@dataclass(frozen=True)
class Array:
    """One of the tensors that a role is kept in. Its name is the role's and ``suffix``."""

    dtype: torch.dtype
    suffix: str = ""
    by: Literal["element", "block"] = "element"  # "block": one word for PER_BLOCK neighbors

    @property
    def word(self) -> str:
        """The integer type that a codec reads this memory as."""
        width = 8 * self.dtype.itemsize
        return f"uint{width}" if self.dtype == torch.uint8 else f"int{width}"


@dataclass(frozen=True)
class Format:
    name: str  # an identifier: generated code has it in names
    arrays: tuple[Array, ...]  # those by block come last
    decode: Callable[..., Float] | None = None  # one word for each array; None: the hardware converts
    encode: Callable[..., Any] | None = None
    title: str = ""  # what users call it
    holds: Literal["anything", "signed", "non-negative"] = "anything"
    is_for: Literal["states", "weights", "all"] = "all"  # weights: parameters, and states that are copies of them
    # formats by block: first each value's word, then the block's word from the largest of these
    measure: Callable[..., Word] | None = None
    of_block: Callable[[Word], Word] | None = None
    takes_noise: bool = False  # encode (or measure) adds the upper bits of a word; noise.HALF rounds to nearest
    is_stochastic: bool = False  # whether that word is random
    encode_if_sole: Callable[[Float], Any] | None = None  # a faster encode, for kernels that read this format alone
    rounds: bool = False  # encode drops bits of a float32, so float64 must not be rounded to nearest before it
    native_on: tuple[str, ...] = ()  # where the hardware converts nevertheless, with the same bits but for NaN's

    @property
    def by_block(self) -> bool:
        return self.measure is not None

    @property
    def is_one_tensor(self) -> bool:
        """Whether a role is one tensor under its own name, whose dtype is all that there is to know."""
        return len(self.arrays) == 1 and not self.arrays[0].suffix

    @property
    def is_deferred(self) -> bool:
        """Whether a value can be stored only once a step: what comes back is not what a second encode would give."""
        return self.by_block or self.is_stochastic

    def is_native(self, backend: str) -> bool:
        """Whether values are converted without the codec on "numba", "triton", "interpreter" or "eager"."""
        return self.decode is None or backend in self.native_on

    def arrays_of(self, role: str) -> dict[str, Array]:
        """The tensors of a role by name. The names are also the table's fields of addresses."""
        return {role + array.suffix: array for array in self.arrays}

    def array_names(self, role: str) -> tuple[str, ...]:
        return tuple(self.arrays_of(role))

    def bytes(self) -> float:
        """Of one value."""
        return sum(a.dtype.itemsize / (PER_BLOCK if a.by == "block" else 1) for a in self.arrays)


def nearest(fmt: Format) -> Format:
    """The same format without its noise, rounded to nearest: what stochastic rounding is compared with."""
    return dataclasses.replace(fmt, name=f"{fmt.name}_nearest", title=f"{fmt.title}_nearest", is_stochastic=False)
