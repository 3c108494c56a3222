"""Checks that refuse bad input before anything is written, with an error that names the argument and what is allowed.

The types of errors are torch.optim's: ValueError for a value out of range, TypeError for an argument of the wrong kind,
RuntimeError for tensors that do not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusedadam.formats import BLOCK, FORMAT_OF_DTYPE, names
from fusedadam.tensors.complex_numbers import COMPLEX_DTYPES
from fusedadam.tensors.factored import is_sharded_in
from fusedadam.tensors.layout import Span, has_memory, overlaps
from fusedadam.tensors.shards import is_dtensor, local
from fusedadam.tensors.transfer import capturing


def number(name: str, value: Any, low: float = 0.0, below: float = math.inf) -> float:
    """A finite number in [low, below); a tensor of one element counts as one."""
    number = real(name, value)
    if not low <= number < below:
        allowed = f"at least {low:g} and finite" if below == math.inf else f"in [{low:g}, {below:g})"
        raise ValueError(f"{name}={value!r} is out of range; it must be {allowed}")
    return number


def finite(name: str, value: Any) -> float:
    """A finite number of either sign."""
    if not math.isfinite(number := real(name, value)):
        raise ValueError(f"{name}={value!r} is out of range; it must be finite")
    return number


def not_positive(name: str, value: Any) -> None:
    if not finite(name, value) <= 0:
        raise ValueError(f"{name}={value!r} is out of range; it must be at most 0")


def at_least_one(name: str, value: Any) -> None:
    number(name, value, low=1.0)


def first_may_be_none(name: str, value: Any) -> None:
    """Two numbers of at least 0, of which the first may be None."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(
            f"{name}={value!r} is a {type(value).__name__}; it must be a pair: None or a number, and a number"
        )
    if len(value) != 2:
        raise ValueError(f"{name}={value!r} has {len(value)} values; it must be a pair: None or a number, and a number")
    for k, part in enumerate(value):
        if k or part is not None:
            number(f"{name}[{k}]", part)


def real(name: str, value: Any) -> float:
    """Any number, as a float; an integer too large for float64 is infinite."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} is a tensor of shape {tuple(value.shape)}; a tensor {name} must have one element")
        if value.device.type == "meta":
            raise RuntimeError(f"{name} is a meta tensor and has no value; it must be on a device")
        value = value.item()
    if isinstance(value, bool) or (not isinstance(value, (int, float)) and not _is_numpy_number(value)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; it must be a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def one_number(name: str, value: Any) -> None:
    """A value that ``float`` accepts."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise RuntimeError(f"{name} has shape {tuple(value.shape)}; it must have one element")
    if not isinstance(value, (Tensor, int, float)):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be a number or a tensor of one element")


def largest_norm(name: str, value: Any) -> float:
    """At least 0, or infinity, which never clips."""
    if not (norm := real(name, value)) >= 0:
        raise ValueError(f"{name}={value!r} is out of range; it must be at least 0, and may be infinite")
    return norm


def max_grad_norm(name: str, value: Any) -> None:
    if value is not None and not real(name, value) >= 0:
        raise ValueError(
            f"{name}={value!r} is out of range; it must be above 0 (inf computes the norm without clipping), or 0 or "
            "None for no clipping"
        )


def max_weight_norm(name: str, value: Any) -> None:
    if value is not None and not real(name, value) > 0:
        raise ValueError(f"{name}={value!r} is out of range; it must be above 0, or None for no limit")


def warmup_steps(name: str, value: Any) -> None:
    if value is not None and not 0 < real(name, value) < math.inf:
        raise ValueError(f"{name}={value!r} is out of range; it must be above 0, or None for no warmup")


def count(name: str, value: Any) -> None:
    """A number of steps."""
    if not (0 <= (steps := real(name, value)) < math.inf and steps == int(steps)):
        raise ValueError(f"{name}={value!r} is out of range; it must be a whole number, at least 0")


def one_of(name: str, value: Any, allowed: Iterable[str]) -> None:
    """One of the ``allowed`` strings; fix them with ``functools.partial(one_of, allowed=(...))``."""
    if value not in tuple(allowed):
        raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(map(repr, allowed))}")


def fraction(name: str, value: Any) -> float:
    """A number from 0 to 1, both included."""
    if not 0 <= (part := real(name, value)) <= 1:
        raise ValueError(f"{name}={value!r} is out of range; it must be in [0, 1]")
    return part


def mode(value: Any) -> None:
    if type(value) is not int or value not in (0, 1):
        raise ValueError(f"mode={value!r} must be 0 (L2, as Adam) or 1 (decoupled weight decay, as AdamW)")


def betas(name: str, value: Any, count: int = 2) -> None:
    """A tuple of ``count`` numbers in [0, 1); for three, use ``functools.partial(betas, count=3)``."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; it must be {count} numbers in [0, 1)")
    if len(value) != count:
        raise ValueError(f"{name}={value!r} must be {count} numbers in [0, 1)")
    for k, beta in enumerate(value):
        number(f"{name}[{k}]", beta, below=1.0)


def boolean(name: str, value: Any, or_none: bool = False) -> None:
    """True or False."""
    if not isinstance(value, bool) and not (or_none and value is None):
        raise TypeError(f"{name}={value!r} must be True or False{' or None' if or_none else ''}")


def seed(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; it must be an int")
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{name}={value!r} is out of range; it must be at least 0 and below 2**64")


def storage_dtype(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, torch.dtype):
        raise TypeError(f"{name}={value!r} must be a torch.dtype or None")
    if value is not None and value not in FORMAT_OF_DTYPE:
        raise ValueError(
            f"{name}={value} is not supported; use one of {names(FORMAT_OF_DTYPE)}, or None for the parameter's own"
        )


def not_differentiable(name: str, value: Any) -> None:
    boolean(name, value)
    if value:
        raise RuntimeError(f"{name}=True is not supported: the step is fused and in place; use torch.optim")


def unsupported(name: str, value: Any, error: type[Exception] = ValueError) -> None:
    """An option that only other optimizers of the family have."""
    boolean(name, value)
    if value:
        raise error(f"{name}=True is not supported by this optimizer; leave {name} out")


def unless(allowed: Any, check: Callable[[str, Any], object]) -> Callable[[str, Any], object]:
    """A check that also allows one more value, such as -1 for "none"."""
    return lambda name, value: None if value == allowed else check(name, value)


def not_captured(why: str) -> None:
    if capturing():
        raise RuntimeError(why)


def iterable_of_parameters(name: str, value: Any) -> None:
    """Parameters, checked without consuming an iterator."""
    kind = type(value).__name__
    if isinstance(value, nn.Module):
        raise TypeError(f"{name} is a module ({kind}); pass its parameters: model.parameters()")
    if isinstance(value, torch.optim.Optimizer):
        raise TypeError(f"{name} is an optimizer ({kind}); pass the parameters of the model: model.parameters()")
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} is a {kind}; it must be parameters, such as model.parameters()")


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


def dtypes_like(param: Tensor, by: str = "element") -> Collection[torch.dtype]:
    """The dtypes of a parameter, its gradient and its states: if one of them is complex, all are, but for states ``by``
    tensor."""
    return COMPLEX_DTYPES if param.is_complex() and by != "tensor" else FORMAT_OF_DTYPE


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


def sharded_as_param(name: str, value: Tensor, param: Tensor, by: str = "element") -> None:
    """A state's local shard has the elements of its parameter's, or the values ``by`` row and the like."""
    if not is_sharded_in(by, value, param):
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
    for _ in _sharing(("grad", grad) for grad in grads):
        raise RuntimeError(
            "the gradients of two parameters share memory, and a step with a GradScaler, which unscales gradients in "
            "place, would divide them twice; give each parameter a gradient of its own: grad.clone()"
        )


def no_shared_memory(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """No two tensors share memory, apart from gradients, which are only read (see ``no_shared_gradients``)."""
    for other, name in _sharing(tensors, ignored=("grad", "grad")):
        raise RuntimeError(f"{other} and {name} share memory; each needs a tensor with memory of its own")


def _sharing(
    tensors: Iterable[tuple[str, Tensor]], ignored: tuple[str, str] | None = None
) -> Iterator[tuple[str, str]]:
    """The names of tensors that share memory, pair by pair, unless they are ``ignored``."""
    on_device: dict[torch.device, list[tuple[str, Span]]] = {}
    for name, tensor in tensors:
        if tensor.numel() and not tensor._is_zerotensor():
            on_device.setdefault(tensor.device, []).append((name, Span(tensor)))
    for spans in on_device.values():
        before: list[tuple[str, Span]] = []  # spans that end after the next one begins
        for name, span in sorted(spans, key=lambda named: named[1].begin):
            before = [named for named in before if named[1].end > span.begin]
            for other, theirs in before:
                if (other, name) != ignored and span.shares(theirs):
                    yield other, name
            before.append((name, span))


def alike(
    tensors: Mapping[str, Tensor], param: str = "param", where: str = "", by_block: Collection[str] = (),
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> None:  # fmt: skip
    """The tensors of one parameter have its shape and device; ``param`` is what the caller calls it. Those ``by_block``
    have one value for 32 neighbors of the last dimension; ``shapes``: of those that leave out dimensions."""
    shape, device = tensors[param].shape, tensors[param].device
    for name, value in tensors.items():
        if name in by_block:
            if value.numel() * BLOCK != tensors[param].numel() or value.shape[:-1] != shape[:-1]:
                raise RuntimeError(
                    f"{where}{name} has shape {tuple(value.shape)}, but its {param} has {tuple(shape)}; it must have "
                    f"one value for {BLOCK} neighbors of the last dimension"
                )
        elif shapes is not None and name in shapes:
            if tuple(value.shape) != tuple(shapes[name]):
                raise RuntimeError(
                    f"{where}{name} has shape {tuple(value.shape)}; for a {param} of shape {tuple(shape)} it must be "
                    f"{tuple(shapes[name])}"
                )
        elif value.shape != shape:
            raise RuntimeError(
                f"{where}{name} has shape {tuple(value.shape)}, but its {param} has {tuple(shape)}; they must be equal"
            )
        if value.device != device:
            raise RuntimeError(
                f"{where}{name} is on {value.device}, but its {param} is on {device}; move it there with .to()"
            )


def _is_numpy_number(value: Any) -> bool:
    import numpy as np

    return isinstance(value, (np.integer, np.floating))
