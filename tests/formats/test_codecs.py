"""Codecs, on every backend: against torch's own conversions, and with a format of two arrays that only tests have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusedadam.formats import FORMAT_OF_DTYPE, FORMATS, Array, Format, codecs, tensors
from fusedadam.formats.format import bits_of_float, float_of_bits
from fusedadam.rules.ops import tensor_sum
from fusedadam.rules.rule import RuleError, Scalar, Value, Values, rule
from tests.support import BF16, F16, F32, F64, PLACES, Case, apply, assert_same_bits, draw

FLOATS32 = torch.cat(
    [
        torch.arange(1 << 16, dtype=torch.int32) << 16,  # every bfloat16
        (torch.arange(1 << 16, dtype=torch.int32) << 16) + 0x8000,  # halfway between neighbors, and NaN payloads
        (torch.arange(1 << 16, dtype=torch.int32) << 16) + 0x7FFF,
        (torch.arange(1 << 16, dtype=torch.int32) << 16) + 0x8001,
        torch.arange(-1 << 31, -(1 << 31) + 300, dtype=torch.int32),  # subnormal
        torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=torch.Generator().manual_seed(0)).int(),
    ]
).view(F32)


def floats64():
    """Values that float32 rounds to a number halfway between two of 16 bits: rounding twice gets them wrong."""
    generator = torch.Generator().manual_seed(0)
    values = FLOATS32[::3].double()
    moved = values * (1 + 2.0**-40 * (torch.randint(3, values.shape, generator=generator).double() - 1))
    limits = torch.tensor([1e300, -1e300, 3.4028235677973366e38, 1e-320, 65519.99999999999, 65520.0], dtype=F64)
    return torch.cat([values, moved, limits])


def once(values, dtype):
    """Rounded once, by numpy for float16; for bfloat16 by scaled integers. NaN stays NaN."""
    if dtype == F16:
        with np.errstate(all="ignore"):
            return torch.from_numpy(values.numpy().astype(np.float16))
    bits = 8  # of precision; below 2**-126 the spacing is constant
    exponent = torch.frexp(values).exponent.clamp(min=-125)
    spacing = torch.ldexp(torch.ones_like(values), exponent - bits)
    return torch.where(torch.isfinite(values), torch.round(values / spacing) * spacing, values).to(BF16)


@rule(scalars=lambda step: {})
def keep(param: Value, grad: Value, state: Value) -> Values:
    state = grad
    param = param + 0.0
    return param, state


def copied(values, dtype, place):
    """What values become when a rule that computes in their own dtype stores them."""
    case = Case(keep, {}, {})
    roles = {"param": torch.zeros_like(values), "grad": values, "state": torch.zeros_like(values, dtype=dtype)}
    (result,) = apply(case, [roles], place)
    return result["state"]


def assert_same(found, expected):
    """Bit for bit, except that a NaN may be any NaN, and in bfloat16 any quiet one."""
    assert torch.equal(found.isnan(), expected.isnan())
    words = found.view(torch.int16)
    wrong = (words != expected.view(torch.int16)) & ~found.isnan()
    assert not wrong.any(), f"{wrong.sum()} of {len(wrong)}"
    assert found.dtype != BF16 or (words[found.isnan()] & 0x40 != 0).all()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_float32_is_rounded_to_nearest_even(dtype, place):
    assert_same(copied(FLOATS32, dtype, place), FLOATS32.to(dtype))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_float64_is_rounded_once(dtype, place):
    values = floats64()
    found, expected = copied(values, dtype, place), once(values, dtype)
    assert_same(found, expected)
    assert (values.float().to(dtype) != expected)[~expected.isnan()].any(), "rounding twice must be visible"


def test_the_codec_of_bfloat16_gives_the_bits_of_torchs_conversion():
    """The eager backend and GPUs convert natively; the codec, as it stands, must not differ."""
    one = FORMATS["bf16"]
    codec = Format("bf16_by_codec", one.arrays, one.decode, one.encode, rounds=True)
    native, by_codec = (torch.empty_like(FLOATS32, dtype=BF16) for _ in "ab")
    tensors.store(one, [native], FLOATS32)
    tensors.store(codec, [by_codec], FLOATS32)
    assert_same(by_codec, native)
    assert (by_codec.view(torch.int16)[by_codec.isnan()] == 0x7FC0).all()
    back = tensors.load(codec, [by_codec], F32)
    assert torch.equal(back.view(torch.int32), by_codec.view(torch.int16).int() << 16)
    finite = ~native.isnan()
    assert torch.equal(tensors.load(one, [native], F32)[finite], back[finite])
    wide = floats64()
    by_codec = torch.empty_like(wide, dtype=BF16)
    tensors.store(codec, [by_codec], wide)
    assert_same(by_codec, once(wide, BF16))


def test_the_faster_encode_agrees_on_all_that_bfloat16_inputs_lead_to():
    one, values = FORMATS["bf16"], FLOATS32[~FLOATS32.isnan()]
    assert torch.equal(one.encode_if_sole(values), one.encode(values))
    nans = (torch.arange(0x7F81, 0x8000, dtype=torch.int32) << 16).view(F32)
    assert one.decode(one.encode_if_sole(nans)).isnan().all()


def decode_split(high, low):
    return float_of_bits((high << 16) | (low & 0xFFFF))


def encode_split(x):
    bits = bits_of_float(x)
    return bits >> 16, bits


SPLIT32 = Format("split32", (Array(torch.int16), Array(torch.int16, "_low")), decode_split, encode_split)


@rule(scalars=lambda step: {"rate": 0.1})
def momentum(param: Value, grad: Value, state: Value, *, rate: Scalar) -> Values:
    state = state + rate * (grad - state)
    param = param - rate * state
    return param, state


@rule(scalars=lambda step: {"rate": 0.1})
def normalized(param: Value, grad: Value, state: Value, *, rate: Scalar) -> Values:
    """Stores the state in its first stage, and sees it as stored in the second."""
    state = state + rate * (grad - state)
    param = param - rate * state / tensor_sum(state * state)
    return param, state


def split(tensor, role):
    bits = tensor.view(torch.int32)
    return {role: (bits >> 16).to(torch.int16), f"{role}_low": bits.to(torch.int16)}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("roles", [("param", "state"), ("state",)], ids=["float32", "in a rule of float64"])
@pytest.mark.parametrize("update", [momentum, normalized], ids=lambda r: r.name)
def test_a_format_of_two_arrays_gives_the_bits_of_float32(update, roles, place, monkeypatch):
    monkeypatch.setitem(FORMATS, "split32", SPLIT32)
    monkeypatch.setitem(FORMAT_OF_DTYPE, torch.int16, "split32")
    case = Case(update, {}, {})
    plain = draw(case, [(3,), (5, 700), (0, 2), ()], [F32 if "param" in roles else F64, F32, F32])
    in_two = [{**own, **{n: t for r in roles for n, t in split(own[r], r).items()}} for own in plain]
    expected = apply(case, plain, place)
    found = apply(case, in_two, place)
    for before, own, new in zip(plain, expected, found, strict=True):
        assert own["param"].numel() == 0 or not torch.equal(own["state"], before["state"])
        for r in roles:
            new[r] = decode_split(new[r].int(), new.pop(f"{r}_low").int())
    assert_same_bits(expected, found)


def decode_with_float(high):
    return float_of_bits(high + 0.5)


def decode_with_division(high):
    return float_of_bits(high / 2)


def decode_with_large_constant(high):
    return float_of_bits(high & 0xFFFFFFFF)


def decode_with_a_sign(high):
    return float_of_bits(-high)


@pytest.mark.parametrize(
    ("decode", "says"),
    [
        (decode_with_float, "only signed 32-bit integers"),
        (decode_with_large_constant, "only signed 32-bit integers"),
        (decode_with_division, r"only \+ - \* & \| \^ << >>"),
        (decode_with_a_sign, "before constants only"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_a_codec_must_not_say(decode, says, monkeypatch):
    monkeypatch.setitem(FORMATS, "bad", Format("bad", (Array(torch.int16),), decode, encode_split))
    (stage,) = momentum.specialize({}).stages
    formats = codecs.StageFormats(stage, dict.fromkeys(momentum.roles, "bad"), "f32", "numba")
    with pytest.raises(RuleError, match=says):
        formats.codec_functions(codecs.WithCalls)
