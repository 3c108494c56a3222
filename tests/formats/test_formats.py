"""Formats as data; what their codecs compute is tested on every backend in tests/formats/test_codecs.py."""

from __future__ import annotations

import pytest
import torch

from fusedadam import formats
from fusedadam.formats import FORMAT_OF_DTYPE, FORMATS, Array, Format, plain
from fusedadam.formats.tensors import from_bytes, in_bytes, load, store
from fusedadam.tensors.layout import PER_BLOCK


def test_a_dtype_names_its_format():
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    assert [FORMAT_OF_DTYPE[d] for d in dtypes] == ["f32", "f16", "bf16", "f64"] == [*FORMATS][:4]
    for dtype, name in FORMAT_OF_DTYPE.items():
        assert FORMATS[name].arrays == (Array(dtype),)
        assert FORMATS[name].array_names("exp_avg") == ("exp_avg",)


def test_a_role_has_a_name_for_each_array():
    two = Format("two", (Array(torch.bfloat16), Array(torch.int8, "_low")))
    assert two.array_names("param") == ("param", "param_low")
    assert [array.word for array in two.arrays] == ["int16", "int8"]
    assert Array(torch.uint8).word == "uint8"


def test_of_plain_formats_only_bfloat16_has_a_codec_and_not_everywhere():
    for name in FORMAT_OF_DTYPE.values():
        one = FORMATS[name]
        assert one.is_native("numba") == (name != "bf16")
        assert one.is_native("triton") and one.is_native("eager")  # noqa: PT018
    assert not FORMATS["bf16"].is_native("interpreter")


@pytest.mark.parametrize("value", [1.0 + 2.0**-30, -1.0 - 2.0**-30, 1e-50, 1e300])
def test_round_to_odd_leaves_a_trace_of_what_was_dropped(value):
    x = torch.tensor([value], dtype=torch.float64)
    odd = plain.round_to_odd(x)
    assert odd.view(torch.int32).item() & 1
    assert (odd.double() != x).all()


def test_round_to_odd_keeps_what_float32_has():
    x = torch.tensor([0.0, -0.0, 1.5, float("inf"), float("-inf"), 1e-45], dtype=torch.float32)
    assert torch.equal(plain.round_to_odd(x.double()).view(torch.int32), x.view(torch.int32))
    assert plain.round_to_odd(torch.tensor([float("nan")], dtype=torch.float64)).isnan().all()


def test_rules_compute_in_float32_unless_the_parameter_is_float64():
    assert formats.compute_dtype(torch.float64) == torch.float64
    assert {formats.compute_dtype(d) for d in FORMAT_OF_DTYPE if d != torch.float64} == {torch.float32}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0,)])
def test_a_tensor_without_elements_is_stored_and_loaded(name, shape):
    """As a process has it whose shard is empty; slice8 took its blocks to have another shape than its exponents."""
    fmt = FORMATS[name]
    shapes = [shape if array.by == "element" else (*shape[:-1], shape[-1] // PER_BLOCK) for array in fmt.arrays]
    arrays = [torch.zeros(own, dtype=array.dtype) for own, array in zip(shapes, fmt.arrays, strict=True)]
    assert load(fmt, arrays, torch.float32).shape == shape
    store(fmt, arrays, torch.zeros(shape))


@pytest.mark.parametrize("shape", [(), (3,), (4, 6), (0, 4)])
def test_low_bits_as_pairs_of_bytes(shape):
    words = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16)
    pairs = in_bytes(words)
    assert pairs.dtype == torch.uint8
    assert pairs.shape == (*shape, 2)
    assert torch.equal(from_bytes(pairs), words)
    other = words.mT if words.dim() == 2 else words  # low bits have the weight's strides
    assert torch.equal(from_bytes(in_bytes(other)), other)
    high = torch.zeros(shape, dtype=torch.bfloat16)
    both = [load(FORMATS["bf16_16"], [high, low], torch.float32) for low in (words, pairs)]
    assert torch.equal(*(value.view(torch.int32) for value in both))
