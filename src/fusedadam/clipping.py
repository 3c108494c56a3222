"""``clip_grad_norm_``: clips gradients in place, as torch does. Clipping inside the step is in rules/clipping.py."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusedadam import backends, checks
from fusedadam.contract import wrappers
from fusedadam.engine.kept_launches import KeptLaunches, LaunchCache
from fusedadam.engine.launch import Launches, norm_of
from fusedadam.engine.member import Member
from fusedadam.rules.clipping import clip_factor, total_norm
from fusedadam.rules.ops import abs, largest, power, total  # noqa: A004
from fusedadam.rules.rule import Flag, Scalar, SpecializedRule, Value, Values, rule
from fusedadam.tensors.complex_numbers import parts_in_memory
from fusedadam.tensors.shards import distributed_like, is_dtensor, is_partial, local
from fusedadam.tensors.transfer import current_streams, outside_inference_mode

__all__ = ["clip_grad_norm_"]

LAUNCHES = LaunchCache(most=4)


def clip_scalars(step: Scalar, max_norm: Scalar, order: Scalar) -> dict[str, Any]:
    return {"max_norm": max_norm, "order": order, "root": 1 / order}


# fmt: off
@rule(scalars=clip_scalars, reports=("norm",))
def clip(
    param: Value, *, max_norm: Scalar, order: Scalar, root: Scalar,
    euclidean: Flag, absolute: Flag, infinite: Flag, scaled: Flag,
) -> Values:
    """``param`` is a gradient here."""
    if euclidean:
        norm = total_norm(param)
    elif absolute:
        norm = total(abs(param))
    elif infinite:
        norm = largest(abs(param))
    else:
        norm = power(total(power(abs(param), order)), root)
    if scaled:
        param = param * clip_factor(norm, max_norm)
    return param
# fmt: on


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:  # fmt: skip
    """Scales the gradients so that their norm, over all of them together, is at most ``max_norm``. Returns the norm
    before clipping.

    The same as :func:`torch.nn.utils.clip_grad_norm_`, fused: gradients are read once for the norm and once to be
    scaled, without a host-device sync. If the norm is infinite, finite gradients become 0 and infinite ones NaN;
    if it is NaN, all become NaN. With ``error_if_nonfinite`` both raise instead, before any gradient is changed; that
    is a host-device sync.

    The norm of a sharded gradient (a DTensor) is the norm of the whole: every process that has a shard must call this
    function. Gradients with a Partial placement are reduced first, and ``grad`` holds the sum afterwards.

    The optimizers here clip inside their step (``max_grad_norm=``), which moves a fifth fewer bytes. Use this function
    to scale the gradients themselves.

    Args:
        parameters: one parameter, or several; parameters without a gradient are skipped
        max_norm: the largest norm allowed; ``inf`` computes the norm without clipping
        norm_type: any p > 0 of a p-norm, ``float("inf")`` for the largest absolute value
        error_if_nonfinite: raise RuntimeError if the norm is NaN or infinite
        foreach: accepted as in torch, and ignored

    Example:
        >>> param = torch.nn.Parameter(torch.zeros(2))
        >>> param.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_(param, max_norm=1.0)
        tensor(5.)
        >>> param.grad
        tensor([0.6000, 0.8000])
    """
    max_norm = checks.largest_norm("max_norm", max_norm)
    checks.boolean("foreach", foreach, or_none=True)
    checks.not_captured("clip_grad_norm_() cannot be captured in a CUDA graph; use torch.nn.utils.clip_grad_norm_")
    order = _order(norm_type)
    flags = {"euclidean": order == 2, "absolute": order == 1, "infinite": order == math.inf}
    specialized = clip.specialize({**flags, "scaled": True})
    checks.iterable_of_parameters("parameters", parameters)
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for k, param in enumerate(params):
        if not isinstance(param, Tensor):
            raise TypeError(f"parameters[{k}] is a {type(param).__name__}; it must be a parameter (a torch.Tensor)")
    if wrappers.are_flat(params):
        raise RuntimeError(
            "FullyShardedDataParallel has flattened and sharded these parameters, so each process has only some of the "
            "gradients; use the model's own clip_grad_norm_"
        )
    grads = _gradients(params, specialized)
    if not grads.wholes:
        return torch.tensor(0.0)
    if order != 2 and any(whole.is_complex() for whole in grads.wholes):
        raise ValueError(
            f"norm_type={norm_type!r} cannot be used with complex gradients, for which only the norm of order 2 is "
            "supported; use norm_type=2, or torch.nn.utils.clip_grad_norm_"
        )
    if error_if_nonfinite:
        norm = _run(grads, {**flags, "scaled": False}, max_norm, order)
        if not torch.isfinite(norm):
            raise RuntimeError(
                f"The total norm of order {order:g} of the gradients is {norm.item()}, so they cannot be clipped; "
                "error_if_nonfinite=False scales them anyway"
            )
    return _run(grads, {**flags, "scaled": True}, max_norm, order)


class Gradients(NamedTuple):
    """``here`` are the local shards of ``wholes``. For k in ``absent``, ``wholes[k]`` is a parameter that has a
    gradient on other processes only."""

    wholes: list[Tensor]
    here: list[Tensor]
    absent: frozenset[int]


def _gradients(parameters: Iterable[Tensor], specialized: SpecializedRule) -> Gradients:
    found: dict[int, Tensor] = {}
    absent = set()
    for param in parameters:
        grad = param.grad
        if grad is None:
            if id(param) not in found and wrappers.is_waited_for(param, specialized):
                absent.add(len(found))
                found[id(param)] = param
            continue
        if is_partial(grad) and is_dtensor(param):  # a Partial gradient has no norm until it is reduced
            grad = param.grad = distributed_like(grad, param)
        found[id(grad)] = grad
    wholes = list(found.values())
    here = [local(whole).new_empty(0) if k in absent else local(whole) for k, whole in enumerate(wholes)]
    # a norm is the same for conjugates, and so is what gradients are multiplied by
    here = [parts_in_memory(grad) if grad.is_complex() else grad for grad in here]
    return Gradients(wholes, here, frozenset(absent))


def _run(grads: Gradients, flags: dict[str, bool], max_norm: float, order: float) -> Tensor:
    key = _likeness(grads, flags)
    kept = LAUNCHES.take(key, grads.here)
    if kept is None or kept.may_share_memory:
        for grad in grads.here:
            checks.written("grad", grad)
        checks.no_shared_memory(("grad that is clipped", grad) for grad in grads.here)
    if kept is None:
        kept = _made(grads, flags)
    scalars, _ = clip.scalars_of([((max_norm, order), 0.0)])
    kept.launches.set_scalars(scalars, np.zeros(len(grads.here), dtype=np.int64))
    written = [g for k, g in enumerate(grads.wholes) if k not in grads.absent] if flags["scaled"] else []
    kept.run([{"param": grad} for grad in grads.here] if kept.launches.needs_tensors else (), written)
    norm = norm_of(kept.launches, "norm")
    assert norm is not None
    LAUNCHES.give_back(key, kept)
    return norm


def _likeness(grads: Gradients, flags: dict[str, bool]) -> Any:
    """Equal for gradients of the same number, sharding and streams, the first of which are alike."""
    wholes, here, absent = grads
    devices = dict.fromkeys(grad.device for grad in here)
    shardings = tuple((w.device_mesh, w.placements) if is_dtensor(w) else None for w in wholes)  # type: ignore[attr-defined]
    return (*flags.values(), *devices, *current_streams(devices), here[0].shape, here[0].dtype, shardings, absent)


def _made(grads: Gradients, flags: dict[str, bool]) -> KeptLaunches:
    specialized, (wholes, here, absent) = clip.specialize(flags), grads
    members = [
        Member(specialized, backends.choose(grad.device, None), {"param": grad}, whole=whole, is_absent=k in absent)
        for k, (whole, grad) in enumerate(zip(wholes, here, strict=True))
    ]
    with outside_inference_mode():  # kept tables are written again in later calls
        return KeptLaunches(Launches(members), here, ["param"])


def _order(norm_type: Any) -> float:
    order = math.inf if norm_type == "inf" else checks.real("norm_type", norm_type)
    if not order > 0:
        raise ValueError(f"norm_type={norm_type!r} is out of range; it must be above 0, or inf")
    return order
