"""The eager backend: the rule as it stands, on torch tensors, wherever torch runs.

Slow beside the others (a dozen passes over memory instead of one), but it needs nothing compiled, and to the bit
it computes what they compute. Tensors are taken in slices, so that temporaries stay small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusedadam.launch_table import LaunchTable, Roles
from fusedadam.storage import compute_dtype

SLICE = 1 << 20


def prepare(table: LaunchTable) -> Callable[[Sequence[Roles]], None]:
    special, flags = table.special, dict(table.special.flags)

    def update(roles: Roles, scalars: dict[str, Tensor | None]) -> None:
        number = compute_dtype(roles["param"].dtype)
        # copies: a rule may store one role in another, and must not see what has been stored already
        values = {r: roles[r].to(number, copy=True) if r in special.inputs else None for r in special.rule.roles}
        if table.grad_scale is not None and values["grad"] is not None:
            values["grad"] = values["grad"] / table.grad_scale.to(number)
        result = special.rule(**values, **scalars, **flags)
        names = special.rule.returned
        new = dict(zip(names, result if isinstance(result, tuple) else (result,), strict=True))
        for role in special.outputs:
            store(roles[role], new[role])

    def run(members: Sequence[Roles]) -> None:
        if table.found_inf is not None and table.found_inf.item() != 0:
            return
        for k, roles in enumerate(members):
            flat = {r: _flat(roles[r]) for r in special.roles}
            number = compute_dtype(roles["param"].dtype)
            # 0-d tensors rather than numbers: torch would multiply a float32 tensor by a number rounded differently
            row = torch.from_numpy(table.rows[:, k].copy()).to(number).to(table.device)
            scalars: dict[str, Tensor | None] = dict.fromkeys(special.rule.scalar_names) | dict(
                zip(special.scalars, row, strict=True)
            )
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
