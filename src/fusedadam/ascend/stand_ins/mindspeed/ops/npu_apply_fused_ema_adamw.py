from fusedadam.ascend.operators import npu_apply_fused_ema_adamw

__all__ = ["npu_apply_fused_ema_adamw"]
