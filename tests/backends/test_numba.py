"""The Numba backend's own: threads, kernel arguments, and the generated loads and stores."""

from __future__ import annotations

import threading

import pytest
import torch

from fusedadam import functional
from fusedadam.backends.numba import kernel
from fusedadam.backends.numba.load_store import LoadStore
from fusedadam.backends.numba.threads import run_in_pool
from fusedadam.optimizers.adamw import adam

ROLES = ("param", "grad", "exp_avg", "exp_avg_sq")
(STAGE,) = adam.specialize(dict.fromkeys(adam.flags, False)).stages


def memory(compute="f32", **storage):
    return LoadStore(STAGE, dict.fromkeys(ROLES, "f32") | storage, compute)


def test_a_kernel_reads_each_of_its_arguments_by_name():
    at = {name: k for k, name in enumerate((*STAGE.scalars, *ROLES, "_size"))}
    text = kernel.source("adam", STAGE, at, dict.fromkeys(ROLES, "f32"), "f32", scaled=False)
    for k, name in enumerate(kernel.ARGUMENTS[:-1]):  # the last is for formats by block
        assert f"    _{name} = {'scalar' if name == 'grad_scale' else 'int64_at'}(_arguments, {k})\n" in text


def test_what_the_hardware_converts_needs_no_codec():
    own = memory(grad="f16")
    assert own.functions() == []
    assert own.load("grad", "_i") == "_load_f16(_at_grad, _i)"
    assert own.store("param", "_i", "x") == ["_store_f32(_at_param, _i, x)"]


def test_bfloat16_is_read_and_written_as_words():
    own = memory(param="bf16")
    assert own.load("param", "_i") == "_decode_bf16(_load_int16(_at_param, _i))"
    assert own.store("param", "_i", "x") == [
        "_word_param = _encode_bf16(x)",
        "_store_int16(_at_param, _i, _word_param)",
    ]


def test_nan_is_not_asked_for_where_all_inputs_are_bfloat16():
    everywhere = memory(**dict.fromkeys(ROLES, "bf16"))
    assert "x != x" not in "".join(everywhere.functions())
    assert "x != x" in "".join(memory(param="bf16").functions())


def test_float64_is_rounded_to_odd_before_the_hardware_rounds_it():
    assert memory("f64", exp_avg="f16").store("exp_avg", "_i", "x") == ["_store_f16(_at_exp_avg, _i, _round_to_odd(x))"]


def test_an_interrupted_step_waits_for_its_threads():
    """They write to memory that the caller may free once control is back."""
    finished, started = threading.Event(), threading.Event()

    def work():
        if threading.current_thread() is threading.main_thread():
            started.wait()
            raise KeyboardInterrupt
        started.set()
        threading.Event().wait(0.3)
        finished.set()

    with pytest.raises(KeyboardInterrupt):
        run_in_pool(work, 2)
    assert finished.is_set()


def test_the_source_of_a_kernel_is_written_once(monkeypatch):
    """Functions of fusedadam.functional prepare a launch in every call, and would spend a fifth of it on the text."""
    tensors = [torch.ones(8) for _ in range(4)]
    functional.adamw_(*tensors, step=1, lr=0.1)
    monkeypatch.setattr("fusedadam.backends.numba.kernel.source", lambda *_: pytest.fail("written again"))
    functional.adamw_(*tensors, step=2, lr=0.1)
