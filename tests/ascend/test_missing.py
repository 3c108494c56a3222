"""Parts of torch_npu and MindSpeed that fusedadam does not have raise, and name a replacement."""

import importlib

import pytest
import torch

from fusedadam.ascend import missing


def of(module, name):
    """As `from module import name` does it."""
    exec(f"from {module} import {name}", {})


MISSING = {
    "torch.npu.foo": (lambda: torch.npu.foo, AttributeError),
    "torch_npu.npu_foo": (lambda: importlib.import_module("torch_npu").npu_foo, AttributeError),
    "torch_npu.optim.NpuFusedFoo": (lambda: importlib.import_module("torch_npu.optim").NpuFusedFoo, AttributeError),
    "torch_npu.npu_fusion_attention": (lambda: of("torch_npu", "npu_fusion_attention"), ImportError),
    "torch_npu.npu_rotary_mul": (lambda: of("torch_npu", "npu_rotary_mul"), ImportError),
    "torch_npu.optim.NpuFusedLion": (lambda: of("torch_npu.optim", "NpuFusedLion"), ImportError),
    "mindspeed.core.optimizer.swap_optimizer": (
        lambda: importlib.import_module("mindspeed.core.optimizer.swap_optimizer"),
        ModuleNotFoundError,
    ),
    "torch_npu.profiler": (lambda: importlib.import_module("torch_npu.profiler"), ModuleNotFoundError),
    "torch_npu.contrib.foo": (lambda: importlib.import_module("torch_npu.contrib.foo"), ModuleNotFoundError),
    "mindspeed.megatron_adaptor": (lambda: importlib.import_module("mindspeed.megatron_adaptor"), ModuleNotFoundError),
    "mindspeed.ops.npu_rms_norm": (lambda: of("mindspeed.ops", "npu_rms_norm"), ImportError),
}

INSTEAD = {
    "torch_npu.npu_fusion_attention": "torch.nn.functional.scaled_dot_product_attention",
    "torch_npu.npu_rotary_mul": "x * cos",
    "torch_npu.optim.NpuFusedLion": "lists the supported names",
    "mindspeed.core.optimizer.swap_optimizer": "Less memory",
    "torch_npu.profiler": "torch.profiler",
    "mindspeed.ops.npu_rms_norm": "torch.nn.functional.rms_norm",
}


@pytest.mark.parametrize("name", MISSING)
def test_what_does_not_exist_says_so_by_name(kind, name):
    use, error = MISSING[name]
    with pytest.raises(error) as raised:
        use()
    assert name in str(raised.value)
    assert INSTEAD.get(name, "") in str(raised.value)


def test_what_does_not_exist_can_be_asked_for(kind):
    torch_npu = importlib.import_module("torch_npu")
    assert not hasattr(torch.npu, "foo")
    assert not hasattr(torch_npu, "npu_foo")
    assert not hasattr(torch_npu.optim, "NpuFusedFoo")
    assert getattr(torch_npu, "npu_fusion_attention", None) is None


def test_what_has_a_replacement_is_not_there(cpu):
    """A name that is provided leaves the table."""
    for name in missing.REPLACEMENTS:
        module, _, last = name.rpartition(".")
        with pytest.raises(ImportError, match=f"fusedadam does not provide {name}; use "):
            of(module, last)
