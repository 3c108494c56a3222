"""The eager backend: the rule as it stands, on torch tensors, wherever torch runs.

Slow beside the others (a dozen passes over memory instead of one), but it needs nothing compiled, and to the bit
it computes what they compute. Tensors are taken in slices, so that temporaries stay small.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedadam.launch_table import LaunchTable, Roles
from fusedadam.storage import STORAGES
from fusedadam.words import WORDS

SLICE = 1 << 20
DTYPES = {name: dtype for dtype, name in STORAGES.items()}


def prepare(table: LaunchTable) -> Callable[[Sequence[Roles]], None]:
    special, compute = table.special, DTYPES[table.compute]

    def number(x: float) -> Tensor:
        # 0-d tensors rather than Python's numbers, which torch would calculate with in other dtypes
        return torch.tensor(x, dtype=compute, device=table.device)

    space: dict[str, Any] = {**WORDS, "divide": operator.truediv, "number": number}
    exec("\n".join(special.functions), space)

    def update(roles: Roles, scalars: Sequence[Tensor]) -> None:
        # copies: a rule may store one role in another, and must not see what has been stored already
        values = {r: roles[r].to(compute, copy=True) for r in special.inputs}
        if table.grad_scale is not None:
            values["grad"] = values["grad"] / table.grad_scale.to(compute)
        for role, value in zip(special.outputs, space["update"](*values.values(), *scalars), strict=True):
            store(roles[role], value)

    def run(members: Sequence[Roles]) -> None:
        if table.found_inf is not None and table.found_inf.item() != 0:
            return
        for k, roles in enumerate(members):
            flat = {r: _flat(roles[r]) for r in special.roles}
            scalars = [number(x) for x in table.rows[:, k].tolist()]
            for start in range(0, int(table.sizes[k]), SLICE):
                update({r: t[start : start + SLICE] for r, t in flat.items()}, scalars)

    return run


def store(target: Tensor, value: Tensor) -> None:
    """Rounds once. torch takes float64 to 16 bits by way of float32, which rounds twice."""
    if value.dtype == torch.float64 and target.dtype in (torch.float16, torch.bfloat16):
        value = _round_to_odd(value)
    target.copy_(value)


def _round_to_odd(x: Tensor) -> Tensor:
    near = x.float()
    back, bits = near.double(), near.view(torch.int32)
    neighbour = torch.where(back.abs() < x.abs(), bits + 1, bits - 1)
    move = (bits & 1 == 0) & (back != x) & (x == x)
    return torch.where(move, neighbour, bits).view(torch.float32)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))
