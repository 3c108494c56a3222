"""What fusedadam does not have of torch_npu and MindSpeed says so by name, with what to use instead."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from typing import Any

INSTEAD = {
    "npu_apply_adam": "fusedadam.Adam",
    "npu_apply_adam_w": "fusedadam.functional.adamw_",
    "npu_format_cast": "the tensor itself: tensors have one format here",
    "npu_fused_attention": "torch.nn.functional.scaled_dot_product_attention",
    "npu_fusion_attention": "torch.nn.functional.scaled_dot_product_attention",
    "npu_prompt_flash_attention": "torch.nn.functional.scaled_dot_product_attention",
    "npu_incre_flash_attention": "torch.nn.functional.scaled_dot_product_attention",
    "npu_rms_norm": "torch.nn.functional.rms_norm",
    "npu_swiglu": "torch.nn.functional.silu(a) * b",
    "npu_gelu": "torch.nn.functional.gelu",
    "npu_silu": "torch.nn.functional.silu",
    "npu_linear": "torch.nn.functional.linear",
    "npu_dtype_cast": "tensor.to(dtype)",
    "npu_conv2d": "torch.nn.functional.conv2d",
    "NpuFusedAdam": "fusedadam.Adam",
    "NpuFusedAdadelta": "torch.optim.Adadelta",
    "NpuFusedLamb": "fusedadam.AdamW, or a LAMB of your own in forty lines: CONTRIBUTING.md",
    "NpuFusedRMSprop": "torch.optim.RMSprop",
    "NpuFusedRMSpropTF": "torch.optim.RMSprop",
    "NpuFusedSGD": "torch.optim.SGD(fused=True)",
    "profiler": "torch.profiler",
}


def sentence(name: str) -> str:
    last = name.rpartition(".")[2]
    use = f"use {INSTEAD[last]}" if last in INSTEAD else "docs/migration.md lists what there is"
    return f"{name} is not among what fusedadam has of {name.split('.')[0]}; {use}"


class Finder:
    """The last to be asked for a module: if it is one of a stand-in's, nobody has it."""

    def __init__(self, stands_in: Any) -> None:
        self._stands_in = stands_in

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if "." in name and self._stands_in(name.split(".")[0]):
            # without name=, which would make `from torch_npu import x` hide this sentence behind one of its own
            raise ModuleNotFoundError(sentence(name))
        return None
