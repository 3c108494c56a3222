from fusedadam.ascend.optimizers import _DistributedMuon

__all__ = ["_DistributedMuon"]
