from typing import Any

from fusedadam.ascend import missing
from fusedadam.ascend.optimizers import (
    NpuFusedAdam,
    NpuFusedAdamP,
    NpuFusedAdamW,
    NpuFusedBertAdam,
    NpuFusedOptimizerBase,
)

__all__ = ["NpuFusedAdam", "NpuFusedAdamP", "NpuFusedAdamW", "NpuFusedBertAdam", "NpuFusedOptimizerBase"]


def __getattr__(name: str) -> Any:
    raise AttributeError(missing.sentence(f"torch_npu.optim.{name}"))
