"""The names of torch_npu, MindSpeed and CANN, and scripts written for Ascend run unmodified on whatever there is."""

from fusedadam.ascend.aclnn import (
    aclGetRecentErrMsg,
    aclnnApplyFusedEmaAdam,
    aclnnApplyFusedEmaAdamGetWorkspaceSize,
)
from fusedadam.ascend.install import install, uninstall
from fusedadam.ascend.operators import npu_apply_fused_adamw_v2, npu_apply_fused_ema_adamw
from fusedadam.ascend.optimizers import FusedEmaAdamW, NpuFusedAdamP, NpuFusedAdamW, NpuFusedBertAdam

__all__ = [
    "FusedEmaAdamW",
    "NpuFusedAdamP",
    "NpuFusedAdamW",
    "NpuFusedBertAdam",
    "aclGetRecentErrMsg",
    "aclnnApplyFusedEmaAdam",
    "aclnnApplyFusedEmaAdamGetWorkspaceSize",
    "install",
    "npu_apply_fused_adamw_v2",
    "npu_apply_fused_ema_adamw",
    "uninstall",
]
