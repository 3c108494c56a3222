"""Counts the collectives of a function, and the bytes that each process contributes."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor")
NO_MESSAGE = ("wait_tensor", "_wrap_tensor_autograd")  # nothing is sent


class Collective(NamedTuple):
    name: str
    bytes: int


class Collectives(TorchDispatchMode):
    """``seen``: every one while the mode is on, whether torch's or ours. They all go through torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in NAMESPACES and func._opname not in NO_MESSAGE:
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            self.seen.append(Collective(func._opname, sum(t.numel() * t.element_size() for t in tensors)))
        return func(*args, **(kwargs or {}))
