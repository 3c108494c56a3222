"""The Triton backend's own: what is generated for a GPU, which the interpreter does not run."""

from __future__ import annotations

import pytest

from fusedadam.optimizers.adamw import adam

pytest.importorskip("triton")

ROLES = ("param", "grad", "exp_avg", "exp_avg_sq")
(STAGE,) = adam.specialize(dict.fromkeys(adam.flags, False)).stages


def source(interpreted, compute="f32", **storage):
    from fusedadam.backends.triton import kernel

    at = {name: k for k, name in enumerate((*STAGE.scalars, *ROLES, "_size"))}
    storage = dict.fromkeys(ROLES, "f32") | storage
    return kernel.source("adam", STAGE, at, storage, compute, scaled=False, interpreted=interpreted)


def test_a_gpu_converts_bfloat16_itself():
    text = source(False, param="bf16")
    assert "param = tl.load(_to_param + _i).to(tl.float32)" in text
    assert "tl.store(_to_param + _i, _new_param.to(tl.bfloat16))" in text
    assert "_encode" not in text


def test_the_interpreter_takes_the_codec():
    text = source(True, param="bf16")
    assert "param = _decode_bf16(tl.load(_to_param + _i).to(tl.int32))" in text
    assert "tl.store(_to_param + _i, _word_param.to(tl.int16))" in text


@pytest.mark.parametrize("interpreted", [False, True])
def test_float64_is_rounded_to_odd_before_the_hardware_rounds_it(interpreted):
    text = source(interpreted, "f64", **{**dict.fromkeys(ROLES, "f64"), "exp_avg": "f16"})
    assert "tl.store(_to_exp_avg + _i, _round_to_odd(_new_exp_avg).to(tl.float16))" in text
