"""Bytes that a step must move, and that an optimizer keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from fusedadam.optimizers.base import FusedOptimizer


def bytes_moved(optimizer: FusedOptimizer) -> int:
    """What a step must read and write by its rule: each element-wise stage moves its roles, in their dtypes."""
    flags, _ = optimizer._options()
    moved = 0
    for group, own in zip(optimizer.param_groups, flags, strict=True):
        for param in group["params"]:
            special = optimizer.rule.specialize(dict(zip(optimizer._flags, own, strict=True)), param)
            tensors = {**optimizer.state[param], "param": param, "grad": param.grad}
            for stage in special.stages:
                if stage.space == "element":
                    moved += sum(tensors[role].nbytes for role in (*stage.reads, *stage.writes))
    return moved


def state_bytes(optimizer: Any, params: Iterable[Tensor]) -> int:
    """What an optimizer keeps beside parameters and gradients, in any of its objects."""
    known = {_storage(t) for p in params for t in (p, p.grad) if t is not None}
    kept = {_storage(t): t.untyped_storage().nbytes() for t in _tensors(vars(optimizer), set())}
    return sum(size for storage, size in kept.items() if storage not in known)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors that can be reached; a tensor subclass that wraps others (quantised ones do) counts as those."""
    if id(value) in seen or isinstance(value, (str, int, float, type)) or value is None:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from _tensors(getattr(value, name), seen)
        else:
            yield value
        return
    if hasattr(value, "__dict__") and not callable(value) and not isinstance(value, Mapping):
        value = vars(value)
    if isinstance(value, (Mapping, list, tuple)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one, seen)
