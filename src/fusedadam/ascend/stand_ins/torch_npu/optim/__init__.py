from typing import Any

from fusedadam.ascend import missing
from fusedadam.ascend.optimizers import NpuFusedAdamP, NpuFusedAdamW, NpuFusedBertAdam

__all__ = ["NpuFusedAdamP", "NpuFusedAdamW", "NpuFusedBertAdam"]


def __getattr__(name: str) -> Any:
    raise AttributeError(missing.sentence(f"torch_npu.optim.{name}"))
