from fusedadam.ascend.optimizers import NpuFusedOptimizerBase

__all__ = ["NpuFusedOptimizerBase"]
