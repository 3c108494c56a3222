"""fusedadam: the Adam family for PyTorch, fused, at the speed of memory, on any device, in Python."""

import importlib
from typing import TYPE_CHECKING, Any

from fusedadam import checks, functional, ops, schedules
from fusedadam.clipping import clip_grad_norm_
from fusedadam.grouping import param_groups
from fusedadam.in_backward import step_in_backward
from fusedadam.optimizers.adadelta import Adadelta
from fusedadam.optimizers.adamp import AdamP
from fusedadam.optimizers.adamw import Adam, AdamW
from fusedadam.optimizers.adan import Adan
from fusedadam.optimizers.ademamix import AdEMAMix
from fusedadam.optimizers.base import FusedOptimizer
from fusedadam.optimizers.bert_adam import BertAdam
from fusedadam.optimizers.declarations import DERIVED, OPTIONS, State
from fusedadam.optimizers.ema_adamw import EmaAdamW
from fusedadam.optimizers.lamb import Lamb
from fusedadam.optimizers.lion import Lion
from fusedadam.optimizers.radam import RAdam
from fusedadam.optimizers.rmsprop import RMSprop, RMSpropTF
from fusedadam.optimizers.schedule_free import ScheduleFreeAdamW
from fusedadam.optimizers.sgd import SGD
from fusedadam.rules.rule import Flag, Scalar, Value, Values, rule

if TYPE_CHECKING:
    from fusedadam import ascend as ascend

__version__ = "0.1.0"
__all__ = ["SGD", "AdEMAMix", "Adadelta", "Adam", "AdamP", "AdamW", "Adan", "BertAdam", "EmaAdamW", "Lamb", "Lion"]
__all__ += ["RAdam", "RMSprop", "RMSpropTF", "ScheduleFreeAdamW"]
__all__ += ["clip_grad_norm_", "functional", "param_groups", "schedules", "step_in_backward"]
# for authors of optimizers: docs/rules.md
__all__ += ["DERIVED", "OPTIONS", "Flag", "FusedOptimizer", "Scalar", "State", "Value", "Values"]
__all__ += ["checks", "ops", "rule"]


def __getattr__(name: str) -> Any:
    if name == "ascend":  # loaded when it is first asked for: most programs never do
        return importlib.import_module("fusedadam.ascend")
    raise AttributeError(f"module 'fusedadam' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is public: the modules that Python adds when it imports them are not."""
    return sorted([*__all__, "ascend", *(name for name in globals() if name.startswith("__"))])
