"""How values are kept in memory: the dtypes a role may have, and the dtype a rule computes in.

A rule never sees storage. Each backend has one ``load_<name>`` and one ``store_<name>`` for every storage
listed here: load gives a value of the compute dtype, store rounds it once, to nearest even.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Storage:
    name: str  # as it appears in generated kernels
    dtype: torch.dtype
    itemsize: int


STORAGES: dict[torch.dtype, Storage] = {
    s.dtype: s
    for s in (
        Storage("f32", torch.float32, 4),
        Storage("f16", torch.float16, 2),
        Storage("bf16", torch.bfloat16, 2),
        Storage("f64", torch.float64, 8),
    )
}


def compute_dtype(param: torch.dtype) -> torch.dtype:
    """float64 parameters are updated in float64, all others in float32, whatever the other roles are kept in."""
    return torch.float64 if param == torch.float64 else torch.float32


def names(dtypes: Iterable[torch.dtype]) -> str:
    """``float32, float16, ...`` for error messages."""
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)
