"""Storage formats: how the values of a role are kept in memory, and the dtype that a rule computes in.

A rule never sees a format. A kernel decodes a role to float32, runs the rule and encodes the result; a rule that
computes in float64 widens what was decoded, and rounds once on the way back. So a format serves every optimizer.

format       what a format is: arrays, and a codec
plain        float32, float16, bfloat16, float64
split        a bfloat16 weight and its low-order bits
stochastic   bfloat16 with stochastic rounding
slice8       8 bits for a value, and an exponent for 32; steps grow with the value
linear8      the same memory, with steps of one size for 32 values
noise        what stochastic rounding adds
tensors      formats on torch's own tensors
codecs       formats as source text, for a backend to compile

A codec is a few functions:

    decode(word, ...) -> float              one word for each array
    encode(float) -> word, ...              by element
    encode(float, noise) -> word, ...       with stochastic rounding

and with an array by block, which has one word for 32 neighbors of the last dimension, three in place of encode:

    measure(float, noise) -> word           the words of a block are compared, and the largest is found
    of_block(largest) -> word               the word of the array by block
    encode(measured, word, float) -> word   the word of the other array, by element

Words are signed 32-bit integers. An array's own are sign-extended when they are loaded (those of uint8 are not), and
every word that encode returns must fit its array in this way, so that it comes back as it was. Code by element is
straight-line code of ``+ - * & | ^ << >>`` on words (which wrap; ``>>`` keeps the sign), comparisons, integer
constants, helper functions and the ops of format.py. formats/codecs.py lowers it to Numba and Triton as rules are
lowered; the eager backend calls it as it stands. It has integer arithmetic only, so all backends produce the same
bits. Formats that the hardware converts have no codec.

To add a format, write a file like split.py and ``register`` it here. What a user writes in ``storage=`` is its title;
what ``holds`` and ``is_for`` say decides for which states it may be chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable

import torch

from fusedadam.formats.format import Array, Format, nearest
from fusedadam.formats.linear8 import LINEAR8
from fusedadam.formats.plain import BF16, F16, F32, F64
from fusedadam.formats.slice8 import SLICE8, SLICE8_SIGNED
from fusedadam.formats.split import SPLIT_8, SPLIT_16
from fusedadam.formats.stochastic import BF16_STOCHASTIC

__all__ = ["FORMATS", "FORMAT_OF_DTYPE", "Array", "Format", "arrays_by_suffix"]
__all__ += ["compute_dtype", "loses_bits", "names", "names_in", "nearest", "register"]

FORMATS: dict[str, Format] = {}


def register(fmt: Format) -> Format:
    """Makes a format known, by its name to kernels and by its title to ``storage=``."""
    return FORMATS.setdefault(fmt.name, fmt)


PLAIN = (F32, F16, BF16, F64)
for each in (*PLAIN, SPLIT_16, SPLIT_8, BF16_STOCHASTIC, SLICE8, SLICE8_SIGNED, LINEAR8):
    register(each)
# The format of a role that is one plain tensor, unless another was chosen for it.
FORMAT_OF_DTYPE: dict[torch.dtype, str] = {fmt.arrays[0].dtype: fmt.name for fmt in PLAIN}


def arrays_by_suffix() -> dict[str, list[Array]]:
    """The suffixes of all formats' arrays, and what kinds of arrays have them."""
    return _arrays_by_suffix(tuple(FORMATS))


@functools.cache  # asked several times for every parameter
def _arrays_by_suffix(formats: tuple[str, ...]) -> dict[str, list[Array]]:
    found: dict[str, list[Array]] = {}
    for array in dict.fromkeys(array for name in formats for array in FORMATS[name].arrays):
        found.setdefault(array.suffix, []).append(array)
    return found


def names_in(role: str, state: Container[str]) -> list[str]:
    """The names of arrays that a state has of a role, in any format."""
    return [role + suffix for suffix in arrays_by_suffix() if role + suffix in state]


def compute_dtype(param: torch.dtype) -> torch.dtype:
    """float64 parameters are updated in float64 and all others in float32, in whichever format the other roles are."""
    return torch.float64 if param == torch.float64 else torch.float32


def loses_bits(fmt: str, compute: str) -> bool:
    """Whether values of a format are rounded when they are loaded, to compute with them in another."""
    return fmt == "f64" and compute != "f64"


def names(dtypes: Iterable[torch.dtype]) -> str:
    """``float32, float16, ...`` for error messages."""
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)
