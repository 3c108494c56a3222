from fusedadam.ascend.optimizers import FusedEmaAdamW

__all__ = ["FusedEmaAdamW"]
