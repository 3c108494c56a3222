"""fusedadam: the Adam family for PyTorch, fused, at the speed of memory, on any device, in Python."""

from fusedadam import functional, schedules
from fusedadam.clipping import clip_grad_norm_
from fusedadam.optimizers.adamp import AdamP
from fusedadam.optimizers.adamw import Adam, AdamW
from fusedadam.optimizers.bert_adam import BertAdam
from fusedadam.optimizers.ema_adamw import EmaAdamW

__version__ = "0.1.0"
__all__ = ["Adam", "AdamP", "AdamW", "BertAdam", "EmaAdamW", "clip_grad_norm_", "functional", "schedules"]
