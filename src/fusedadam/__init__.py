"""fusedadam: the Adam family for PyTorch, fused, at the speed of memory, on any device, in Python."""

from fusedadam import functional
from fusedadam.optimizers.adamw import Adam, AdamW
from fusedadam.optimizers.ema_adamw import EmaAdamW

__version__ = "0.1.0"
__all__ = ["Adam", "AdamW", "EmaAdamW", "functional"]
