"""Storage formats: how the values of a role are kept in memory, and the dtype that a rule computes in.

A rule never sees a format. A kernel decodes a role to float32, runs the rule and encodes the result; a rule that
computes in float64 widens what was decoded, and rounds once on the way back. So a codec serves every optimizer.

A ``Format`` is data: the arrays that hold a value, and a codec, which is two plain functions.

    decode(word, ...) -> float      one word for each array
    encode(float) -> word, ...

Words are signed 32-bit integers. An array's own are sign-extended when they are loaded, and every word that encode
returns must fit its array in this way, so that it comes back as it was.
A codec is straight-line code of ``+ - * & | ^ << >>`` on words (which wrap; ``>>`` keeps the sign), comparisons,
integer constants, helper functions and the ops below. backends/codecs.py lowers it to Numba and Triton as rules are
lowered; the eager backend calls it as it stands. It has integer arithmetic only, so all backends produce the same
bits. Formats that the hardware converts have no codec.

To add a format that is one plain tensor, add it to ``FORMATS``. For formats of several arrays the kernels are ready,
and the table has a field for each array. Not there yet: an option that chooses one; the creation, snapshot and state
dicts of the extra arrays; ``Member.formats`` for roles whose dtype does not tell. A role that cannot be read back
before the last stage is deferred: ``rule.specialize(deferred=...)``, rules/stages.py.

The low-memory formats that come next would be written like this:

bf16_16           Arrays: bfloat16, and int16 (``_low``). decode: ``float_of_bits((high << 16) + low)``, without low if
                  high alone is a zero or an infinity and the two together are a NaN: then somebody else has written
                  high, ``param.zero_()`` say. encode: ``(bits + 0x8000) >> 16, (bits << 16) >> 16``; 0x7FC0, 0 for NaN.
bf16_8            The same with int8 and ``low << 8``; encode takes noise.
bf16_stochastic   ``decode_bf16``; encode: ``(bits + (noise & 0xFFFF)) >> 16``, and ``where`` for infinity and NaN.
slice8            Arrays: uint8 by element (``_codes``) and uint8 by block (``_exponents``). ``decode(code, exponent)``
                  adds and shifts; encode needs the exponent of the whole block.

Noise is one more argument, ``encode(x, noise)``: a word that a hash, itself a codec function, makes of the element's
global index and the step's key. It enters where load_store.py of a backend encodes, which knows the index ``_i``; the
tensor's first index and the key, an integer, become two fields of the table.

An array by block has one word for several elements, and is loaded at ``_i // 32``. Its encode comes in two parts, with
the largest word of the block taken in between: ``measure(x, noise) -> word``, then ``encode(word, largest)``. The
reduction enters in load_store.py as well: over 32 neighbors of the innermost loop (Numba), by a reshape to (..., 32)
and ``tl.max`` (Triton), by ``view(-1, 32).amax`` (eager).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import abs, where  # noqa: A004

Word: TypeAlias = Any  # signed 32-bit integers
Float: TypeAlias = Any  # float32; float64 where it says so


def bits_of_float(x: Float) -> Word:
    return x.view(torch.int32)


def float_of_bits(bits: Word) -> Float:
    return bits.view(torch.float32)


def narrow(x: Float) -> Float:
    """float64 to float32, to nearest even."""
    return x.float()


def widen(x: Float) -> Float:
    """float32 to float64."""
    return x.double()


# what a codec may call; backends bind functions of the same names
OPS: dict[str, Callable[..., Any]] = {
    "abs": abs, "bits_of_float": bits_of_float, "float_of_bits": float_of_bits, "narrow": narrow, "where": where,
    "widen": widen,
}  # fmt: skip


@dataclass(frozen=True)
class Array:
    """One of the tensors that a role is kept in. Its name is the role's and ``suffix``."""

    dtype: torch.dtype
    suffix: str = ""
    by: str = "element"  # "block", one word for several elements, is not supported yet

    @property
    def word(self) -> str:
        """The integer type that a codec reads this memory as."""
        width = 8 * self.dtype.itemsize
        return f"uint{width}" if self.dtype == torch.uint8 else f"int{width}"


@dataclass(frozen=True)
class Format:
    name: str  # an identifier: generated code has it in names
    arrays: tuple[Array, ...]
    decode: Callable[..., Float] | None = None  # None: the hardware converts
    encode: Callable[[Float], Any] | None = None
    encode_if_sole: Callable[[Float], Any] | None = None  # a faster encode, for kernels that read this format alone
    rounds: bool = False  # encode drops bits of a float32, so float64 must not be rounded to nearest before it
    native_on: tuple[str, ...] = ()  # where the hardware converts nevertheless, with the same bits but for NaN's

    def is_native(self, backend: str) -> bool:
        """Whether values are converted without the codec on "numba", "triton", "interpreter" or "eager"."""
        return self.decode is None or backend in self.native_on

    def array_names(self, role: str) -> tuple[str, ...]:
        """The tensors of a role, which are also the table's fields of addresses."""
        return tuple(role + array.suffix for array in self.arrays)


def decode_bf16(high: Word) -> Float:
    return float_of_bits(high << 16)


def encode_bf16(x: Float) -> Word:
    # rounding could carry a NaN with a full mantissa over into zero
    return where(x != x, 0x7FC0, to_nearest_even(x))


def to_nearest_even(x: Float) -> Word:
    bits = bits_of_float(x)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def round_to_odd(x: Float) -> Float:
    """float64 to float32 such that rounding once more, to fewer bits, gives the same result as rounding only once."""
    near = narrow(x)
    back, bits = widen(near), bits_of_float(near)
    neighbor = where(abs(back) < abs(x), bits + 1, bits - 1)
    move = ((bits & 1) == 0) & ((back < x) | (back > x))
    return float_of_bits(where(move, neighbor, bits))


FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        Format("f32", (Array(torch.float32),)),
        Format("f16", (Array(torch.float16),), rounds=True),
        Format(
            "bf16",
            (Array(torch.bfloat16),),
            decode_bf16,
            encode_bf16,
            to_nearest_even,  # NaNs made of bfloat16 values end in 16 zero bits: nothing is carried
            rounds=True,
            native_on=("triton", "eager"),  # one instruction, one pass; Triton's interpreter truncates
        ),
        Format("f64", (Array(torch.float64),)),
    )
}
# The format of a role that is one plain tensor. A format of several arrays has no dtype of its own.
FORMAT_OF_DTYPE: dict[torch.dtype, str] = {
    fmt.arrays[0].dtype: fmt.name for fmt in FORMATS.values() if len(fmt.arrays) == 1
}


def compute_dtype(param: torch.dtype) -> torch.dtype:
    """float64 parameters are updated in float64 and all others in float32, in whichever format the other roles are."""
    return torch.float64 if param == torch.float64 else torch.float32


def names(dtypes: Iterable[torch.dtype]) -> str:
    """``float32, float16, ...`` for error messages."""
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)
