from fusedadam.ascend.operators import npu_apply_fused_adamw_v2

__all__ = ["npu_apply_fused_adamw_v2"]
