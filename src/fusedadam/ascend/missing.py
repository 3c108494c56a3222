"""Errors for the parts of torch_npu and MindSpeed that fusedadam does not have: they name a replacement."""

from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

REPLACEMENTS = {
    "npu_apply_adam": "fusedadam.Adam",
    "npu_apply_adam_w": "fusedadam.functional.adamw_",
    "npu_format_cast": "the tensor itself: there is only one format here",
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
    "NpuFusedLamb": "fusedadam.AdamW, or write LAMB as a rule (CONTRIBUTING.md)",
    "NpuFusedRMSprop": "torch.optim.RMSprop",
    "NpuFusedRMSpropTF": "torch.optim.RMSprop",
    "NpuFusedSGD": "torch.optim.SGD(fused=True)",
    "profiler": "torch.profiler",
}


def sentence(name: str) -> str:
    last = name.rpartition(".")[2]
    use = f"use {REPLACEMENTS[last]}" if last in REPLACEMENTS else "docs/migration.md lists the supported names"
    return f"fusedadam does not provide {name}; {use}"


class Finder:
    """The last finder on ``sys.meta_path``, so a module of a stand-in that reaches it does not exist."""

    def __init__(self, is_stand_in: Callable[[str], bool]) -> None:
        self._is_stand_in = is_stand_in

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if "." in name and self._is_stand_in(name.split(".")[0]):
            # no name=: with it, `from torch_npu import x` would replace this message by a general one
            raise ModuleNotFoundError(sentence(name))
        return None
