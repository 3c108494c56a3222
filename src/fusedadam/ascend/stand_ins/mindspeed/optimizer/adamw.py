from fusedadam.ascend.optimizers import FusedTorchAdamW
from fusedadam.ascend.optimizers import MindSpeedAdamW as AdamW

__all__ = ["AdamW", "FusedTorchAdamW"]
