"""fusedadam: the Adam family for PyTorch, fused, at the speed of memory, on any device, in Python."""

import importlib
from typing import TYPE_CHECKING, Any

from fusedadam import functional, schedules
from fusedadam.clipping import clip_grad_norm_
from fusedadam.in_backward import step_in_backward
from fusedadam.optimizers.adadelta import Adadelta
from fusedadam.optimizers.adamp import AdamP
from fusedadam.optimizers.adamw import Adam, AdamW
from fusedadam.optimizers.bert_adam import BertAdam
from fusedadam.optimizers.ema_adamw import EmaAdamW
from fusedadam.optimizers.lamb import Lamb
from fusedadam.optimizers.rmsprop import RMSprop, RMSpropTF
from fusedadam.optimizers.sgd import SGD

if TYPE_CHECKING:
    from fusedadam import ascend as ascend

__version__ = "0.1.0"
__all__ = ["SGD", "Adadelta", "Adam", "AdamP", "AdamW", "BertAdam", "EmaAdamW", "Lamb", "RMSprop", "RMSpropTF"]
__all__ += ["clip_grad_norm_", "functional", "schedules", "step_in_backward"]


def __getattr__(name: str) -> Any:
    if name == "ascend":  # loaded when it is first asked for: most programs never do
        return importlib.import_module("fusedadam.ascend")
    raise AttributeError(f"module 'fusedadam' has no attribute {name!r}")
