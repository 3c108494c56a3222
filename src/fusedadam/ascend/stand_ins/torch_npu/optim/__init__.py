from typing import Any

from fusedadam.ascend import missing, optimizers
from fusedadam.ascend.optimizers import *

__all__ = optimizers.__all__


def __getattr__(name: str) -> Any:
    raise AttributeError(missing.sentence(f"torch_npu.optim.{name}"))
