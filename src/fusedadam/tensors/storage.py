"""How values are kept in memory: the dtypes a role may have, and the dtype a rule computes in.

A rule never sees storage. Backends load a role into the compute dtype and round it once, to nearest even, on the way
back.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

STORAGES: dict[torch.dtype, str] = {  # and what they are called in generated kernels
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float64: "f64",
}


def compute_dtype(param: torch.dtype) -> torch.dtype:
    """float64 parameters are updated in float64, all others in float32, whatever the other roles are kept in."""
    return torch.float64 if param == torch.float64 else torch.float32


def names(dtypes: Iterable[torch.dtype]) -> str:
    """``float32, float16, ...`` for error messages."""
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)
