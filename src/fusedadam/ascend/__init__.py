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

from fusedadam.ascend import aclnn, apply_adam, operators, optimizers
from fusedadam.ascend.aclnn import *
from fusedadam.ascend.apply_adam import *
from fusedadam.ascend.install import install, uninstall
from fusedadam.ascend.mindspeed import FusedEmaAdamW, FusedTorchAdamW
from fusedadam.ascend.operators import *
from fusedadam.ascend.optimizers import *

__all__ = ["FusedEmaAdamW", "FusedTorchAdamW", "install", "uninstall"]
__all__ += aclnn.__all__
__all__ += apply_adam.__all__
__all__ += operators.__all__
__all__ += optimizers.__all__
