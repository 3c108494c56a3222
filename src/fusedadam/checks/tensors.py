"""Checks of tensors: whether a kernel can read or write them, and whether those of one step fit together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fusedadam.formats import FORMAT_OF_DTYPE, names
from fusedadam.tensors.complex_numbers import COMPLEX_DTYPES
from fusedadam.tensors.factored import is_sharded_in
from fusedadam.tensors.layout import has_memory, overlaps, sharing
from fusedadam.tensors.shards import is_dtensor, local
from fusedadam.tensors.transfer import capturing


def not_captured(why: str) -> None:
    if capturing():
        raise RuntimeError(why)


def tensor(name: str, value: Any, dtypes: Collection[torch.dtype] = FORMAT_OF_DTYPE) -> None:
    """A tensor that a kernel can read: of a supported dtype, strided, and with memory behind it."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be a torch.Tensor")
    value = local(value)
    if value.layout != torch.strided:
        kind = str(value.layout).removeprefix("torch.")
        raise RuntimeError(
            f"{name} has layout {kind}, and sparse or opaque layouts are not supported; "
            "convert it with .to_dense(), or use torch.optim.SparseAdam"
        )
    if value.dtype not in dtypes:
        raise RuntimeError(f"{name} has dtype {names([value.dtype])}; it must be one of {names(dtypes)}")
    if value.device.type == "meta":
        raise RuntimeError(
            f"{name} is a meta tensor and has no memory; materialise it first, with .to_empty(device=...)"
        )
    if isinstance(value, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(value):
        where = "FakeTensorMode" if isinstance(value, FakeTensor) else "a transform of torch.func, such as vmap or grad"
        raise RuntimeError(
            f"{name} belongs to {where}, and has no memory to read or write; make the optimizer and call step() outside"
        )
    if has_memory(value):
        return
    if value.data_ptr() == 0:
        kind = type(value).__name__
        raise RuntimeError(
            f"{name} is a {kind} without memory of its own (sharded or wrapped, or was its storage freed?); use its "
            "local tensor, or a copy"
        )
    raise RuntimeError(
        f"{name} has {value.numel()} elements, for which its storage of {value.untyped_storage().nbytes()} bytes is "
        "too small: the storage was resized under the tensor; resize it back, or use another tensor"
    )


def new_tensors(name: str) -> None:
    """Refuses modes in which new tensors have no memory: FakeTensorMode, torch.func."""
    tensor(f"{name}: a new tensor", torch.empty(0, dtype=torch.float32, device="cpu"))


def dtypes_like(param: Tensor, space: str = "element") -> Collection[torch.dtype]:
    """The dtypes of a parameter, its gradient and its states: if one of them is complex, all are, but for states by
    tensor."""
    return COMPLEX_DTYPES if param.is_complex() and space != "tensor" else FORMAT_OF_DTYPE


def written(name: str, value: Any, dtypes: Collection[torch.dtype] = FORMAT_OF_DTYPE) -> None:
    """A tensor that a kernel can write: no two elements share memory."""
    tensor(name, value, dtypes)
    value = local(value)
    if value.is_conj():
        raise RuntimeError(f"{name} is lazily conjugated: its memory has other values; use .resolve_conj()")
    if value._is_zerotensor():
        raise RuntimeError(f"{name} is a ZeroTensor, which has no memory to be written to; use .clone()")
    if overlaps(value):
        raise RuntimeError(
            f"{name} has shape {tuple(value.shape)} and strides {value.stride()}: several of its elements may share "
            "memory (is it expanded?), so it cannot be updated in place; use .clone() or .contiguous()"
        )


def both_sharded(name: str, value: Any, param: Tensor) -> None:
    """A gradient or state is a DTensor if, and only if, its parameter is."""
    if is_dtensor(value) != is_dtensor(param):
        kinds = ("a DTensor", "a plain tensor")
        kind, param_kind = kinds if is_dtensor(value) else kinds[::-1]
        raise RuntimeError(
            f"{name} is {kind}, but its param is {param_kind}; both must be DTensors (torch.distributed.tensor."
            "distribute_tensor), or neither"
        )


def sharded_as_param(name: str, value: Tensor, param: Tensor, space: str) -> None:
    """A state's local shard has the elements of its parameter's, or the values by row and the like."""
    if not is_sharded_in(space, value, param):
        raise RuntimeError(
            f"{name} is not sharded as its param is; set it with load_state_dict, or with torch.distributed.checkpoint"
        )


def unscalable(grads: Sequence[Tensor]) -> None:
    """Gradients that a step with a GradScaler can divide where they are."""
    for grad in grads:
        if grad.is_inference():
            raise RuntimeError(
                "grad is an inference tensor, which a step with a GradScaler cannot unscale in place, as torch's fused "
                "optimizers do; use grad.clone() outside torch.inference_mode()"
            )
        if overlaps(grad):
            raise RuntimeError(
                f"grad has shape {tuple(grad.shape)} and strides {grad.stride()}: several of its elements may share "
                "memory (is it expanded?), so a step with a GradScaler cannot unscale it in place; use grad.clone()"
            )
    no_shared_gradients(grads)


def no_shared_gradients(grads: Iterable[Tensor]) -> None:
    for _ in sharing(("grad", grad) for grad in grads):
        raise RuntimeError(
            "the gradients of two parameters share memory, and a step with a GradScaler, which unscales gradients in "
            "place, would divide them twice; give each parameter a gradient of its own: grad.clone()"
        )


def no_shared_memory(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """No two tensors share memory, apart from gradients, which are only read (see ``no_shared_gradients``)."""
    for other, name in sharing(tensors, ignored=("grad", "grad")):
        raise RuntimeError(f"{other} and {name} share memory; each needs a tensor with memory of its own")


def alike(
    tensors: Mapping[str, Tensor],
    param: str = "param",
    where: str = "",
    shapes: Mapping[str, Sequence[int]] | None = None,
    hosted: Collection[str] = (),
) -> None:
    """The tensors of one parameter have its shape and device; ``param`` is what the caller calls it. ``shapes``: of
    those that have fewer values; ``hosted``: those in host memory, which the device reads."""
    shape, device = tensors[param].shape, tensors[param].device
    for name, value in tensors.items():
        if shapes is not None and name in shapes:
            if tuple(value.shape) != tuple(shapes[name]):
                raise RuntimeError(
                    f"{where}{name} has shape {tuple(value.shape)}; for a {param} of shape {tuple(shape)} it must be "
                    f"{tuple(shapes[name])}"
                )
        elif value.shape != shape:
            raise RuntimeError(
                f"{where}{name} has shape {tuple(value.shape)}, but its {param} has {tuple(shape)}; they must be equal"
            )
        if value.device != device and name not in hosted:
            raise RuntimeError(
                f"{where}{name} is on {value.device}, but its {param} is on {device}; move it there with .to()"
            )
