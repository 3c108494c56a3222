"""Errors for the parts of torch_npu and MindSpeed that fusedadam does not have: they name a replacement."""

from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
ROTARY = "x * cos + torch.cat((-b, a), -1) * sin, with a, b = x.chunk(2, -1)"
OFFLOAD = "offload=True of optimizers of fusedadam (its page: Less memory)"
LESS_MEMORY = "storage= of optimizers of fusedadam (its page: Less memory)"
SHARDING = "torch.distributed.fsdp.fully_shard (its page: Sharded models)"

# docs/ascend.md lists them, too
REPLACEMENTS = {
    "torch_npu.get_npu_format": "nothing: there is only one format here",
    "torch_npu.npu_format_cast": "the tensor itself: there is only one format here",
    "torch_npu.npu_format_cast_": "the tensor itself: there is only one format here",
    "torch_npu.npu_fused_attention": ATTENTION,
    "torch_npu.npu_fusion_attention": ATTENTION,
    "torch_npu.npu_prompt_flash_attention": ATTENTION,
    "torch_npu.npu_incre_flash_attention": ATTENTION,
    "torch_npu.npu_rms_norm": "torch.nn.functional.rms_norm",
    "torch_npu.npu_add_rms_norm": "torch.nn.functional.rms_norm(x1 + x2, ...)",
    "torch_npu.npu_rotary_mul": ROTARY,
    "torch_npu.npu_scaled_masked_softmax": "torch.softmax((scale * x).masked_fill(mask, -10000), -1)",
    "torch_npu.npu_swiglu": "torch.nn.functional.silu(a) * b",
    "torch_npu.npu_gelu": "torch.nn.functional.gelu",
    "torch_npu.fast_gelu": "torch.nn.functional.gelu",
    "torch_npu.npu_silu": "torch.nn.functional.silu",
    "torch_npu.npu_linear": "torch.nn.functional.linear",
    "torch_npu.npu_conv2d": "torch.nn.functional.conv2d",
    "torch_npu.npu_dtype_cast": "tensor.to(dtype)",
    "torch_npu.npu_transpose": "tensor.permute",
    "torch_npu.npu_confusion_transpose": "tensor.permute and tensor.reshape",
    "torch_npu.npu_max": "torch.max(x, dim)",
    "torch_npu.npu_min": "torch.min(x, dim)",
    "torch_npu.npu_grouped_matmul": "a loop of torch.matmul",
    "torch_npu.profiler": "torch.profiler",
    "torch_npu.testing": "torch.testing",
    "mindspeed.megatron_adaptor": "Megatron-LM itself: the module adapts it to NPUs",
    "mindspeed.ops.ffn": "torch.nn.functional.linear and an activation",
    "mindspeed.ops.fusion_attention_v2": ATTENTION,
    "mindspeed.ops.gmm": "a loop of torch.matmul",
    "mindspeed.ops.grouped_matmul": "a loop of torch.matmul",
    "mindspeed.ops.npu_groupmatmul_add": "a loop of torch.addmm",
    "mindspeed.ops.npu_matmul_add": "torch.addmm",
    "mindspeed.ops.npu_rotary_position_embedding": ROTARY,
    "mindspeed.core.optimizer.distrib_optimizer": SHARDING,
    "mindspeed.core.optimizer.low_precision": LESS_MEMORY,
    "mindspeed.core.optimizer.muon": "fusedadam.Muon",
    "mindspeed.core.optimizer.swap_optimizer": OFFLOAD,
    "mindspeed.core.optimizer.virtual_optimizer": LESS_MEMORY,
    "mindspeed.optimizer.distrib_optimizer": SHARDING,
}
BY_LAST_NAME = {name.rpartition(".")[2]: instead for name, instead in REPLACEMENTS.items()}


def sentence(name: str) -> str:
    instead = REPLACEMENTS.get(name) or BY_LAST_NAME.get(name.rpartition(".")[2])
    use = f"use {instead}" if instead else "the page on Ascend scripts lists the supported names"
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
