from fusedadam.ascend.mindspeed import AdamW, FusedTorchAdamW

__all__ = ["AdamW", "FusedTorchAdamW"]
