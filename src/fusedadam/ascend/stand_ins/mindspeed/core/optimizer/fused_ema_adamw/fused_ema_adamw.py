from fusedadam.ascend.operators import fused_ema_adamw
from fusedadam.ascend.optimizers import FusedEmaAdamW

__all__ = ["FusedEmaAdamW", "fused_ema_adamw"]
