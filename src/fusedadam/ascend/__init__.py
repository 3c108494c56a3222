"""Scripts written for Ascend run unmodified, on a GPU or a CPU: the APIs of torch_npu, MindSpeed and CANN.

``import torch_npu``, ``.npu()`` and ``device="npu"`` work once install() was called. Of the other rooms, only
``cli/`` imports it.

optimizers.py  torch_npu's optimizers, mindspeed.py: MindSpeed's
operators.py   MindSpeed's operators, apply_adam.py: torch_npu's, aclnn.py: CANN's two-phase calls
install.py     install() and uninstall()
device.py      the device that "npu" means, and its translation
mode.py        translates "npu" in calls of torch functions
patches.py     attributes of torch that are replaced, because the mode does not see them
npu.py         torch.npu, and amp.py: torch.npu.amp
on_cpu.py      torch.npu where "npu" means the CPU
missing.py     errors for the parts of torch_npu and MindSpeed that fusedadam does not have
stand_ins/     the packages torch_npu and mindspeed that scripts import
"""

from fusedadam.ascend.aclnn import (
    aclGetRecentErrMsg,
    aclnnApplyAdamWV2,
    aclnnApplyAdamWV2GetWorkspaceSize,
    aclnnApplyFusedEmaAdam,
    aclnnApplyFusedEmaAdamGetWorkspaceSize,
)
from fusedadam.ascend.apply_adam import npu_apply_adam, npu_apply_adam_w, npu_bert_apply_adam
from fusedadam.ascend.install import install, uninstall
from fusedadam.ascend.mindspeed import FusedEmaAdamW, FusedTorchAdamW
from fusedadam.ascend.operators import fused_ema_adamw, npu_apply_fused_adamw_v2, npu_apply_fused_ema_adamw
from fusedadam.ascend.optimizers import (
    NpuFusedAdadelta,
    NpuFusedAdam,
    NpuFusedAdamP,
    NpuFusedAdamW,
    NpuFusedBertAdam,
    NpuFusedLamb,
    NpuFusedOptimizerBase,
    NpuFusedRMSprop,
    NpuFusedRMSpropTF,
    NpuFusedSGD,
)

__all__ = [
    "FusedEmaAdamW",
    "FusedTorchAdamW",
    "NpuFusedAdadelta",
    "NpuFusedAdam",
    "NpuFusedAdamP",
    "NpuFusedAdamW",
    "NpuFusedBertAdam",
    "NpuFusedLamb",
    "NpuFusedOptimizerBase",
    "NpuFusedRMSprop",
    "NpuFusedRMSpropTF",
    "NpuFusedSGD",
    "aclGetRecentErrMsg",
    "aclnnApplyAdamWV2",
    "aclnnApplyAdamWV2GetWorkspaceSize",
    "aclnnApplyFusedEmaAdam",
    "aclnnApplyFusedEmaAdamGetWorkspaceSize",
    "fused_ema_adamw",
    "install",
    "npu_apply_adam",
    "npu_apply_adam_w",
    "npu_apply_fused_adamw_v2",
    "npu_apply_fused_ema_adamw",
    "npu_bert_apply_adam",
    "uninstall",
]
