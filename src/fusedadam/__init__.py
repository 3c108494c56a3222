"""The Adam family for PyTorch, fused: optimizer steps at memory bandwidth, on CPU and GPU, in plain Python."""

import importlib
from typing import TYPE_CHECKING, Any

from fusedadam import startup  # noqa: F401  # first: a command reacts to Ctrl-C during the imports below

# isort: split
from fusedadam import checks, functional, ops, schedules
from fusedadam.clipping import clip_grad_norm_
from fusedadam.contract.base import FusedOptimizer
from fusedadam.contract.declarations import DERIVED, OPTIONS, State
from fusedadam.grouping import param_groups
from fusedadam.in_backward import step_in_backward
from fusedadam.optimizers.adadelta import Adadelta
from fusedadam.optimizers.adafactor import Adafactor
from fusedadam.optimizers.adamp import AdamP
from fusedadam.optimizers.adamw import Adam, AdamW
from fusedadam.optimizers.adan import Adan
from fusedadam.optimizers.ademamix import AdEMAMix
from fusedadam.optimizers.bert_adam import BertAdam
from fusedadam.optimizers.ema_adamw import EmaAdamW
from fusedadam.optimizers.lamb import Lamb
from fusedadam.optimizers.lion import Lion
from fusedadam.optimizers.muon import Muon
from fusedadam.optimizers.nadam import NAdam
from fusedadam.optimizers.radam import RAdam
from fusedadam.optimizers.rmsprop import RMSprop, RMSpropTF
from fusedadam.optimizers.schedule_free import ScheduleFreeAdamW
from fusedadam.optimizers.sgd import SGD
from fusedadam.rules.newton_schulz import NewtonSchulz
from fusedadam.rules.rule import ColumnValue, Flag, RowValue, Scalar, TensorValue, Value, Values, rule

if TYPE_CHECKING:
    from fusedadam import ascend as ascend

__version__ = "0.2.0"
__all__ = ["SGD", "AdEMAMix", "Adadelta", "Adafactor", "Adam", "AdamP", "AdamW", "Adan", "BertAdam", "EmaAdamW"]
__all__ += ["Lamb", "Lion", "Muon", "NAdam", "RAdam", "RMSprop", "RMSpropTF", "ScheduleFreeAdamW"]
__all__ += ["clip_grad_norm_", "functional", "param_groups", "schedules", "step_in_backward"]
# for authors of optimizers: docs/rules.md
__all__ += ["DERIVED", "OPTIONS", "ColumnValue", "Flag", "FusedOptimizer", "NewtonSchulz", "RowValue", "Scalar"]
__all__ += ["State", "TensorValue", "Value", "Values"]
__all__ += ["checks", "ops", "rule"]


def __getattr__(name: str) -> Any:
    if name == "ascend":  # loaded when it is first asked for: most programs never do
        return importlib.import_module("fusedadam.ascend")
    raise AttributeError(f"module 'fusedadam' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is public: the modules that Python adds when it imports them are not."""
    return sorted([*__all__, "ascend", *(name for name in globals() if name.startswith("__"))])
