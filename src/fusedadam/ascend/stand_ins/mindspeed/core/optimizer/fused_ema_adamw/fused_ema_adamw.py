from fusedadam.ascend.mindspeed import FusedEmaAdamW
from fusedadam.ascend.operators import fused_ema_adamw

__all__ = ["FusedEmaAdamW", "fused_ema_adamw"]
