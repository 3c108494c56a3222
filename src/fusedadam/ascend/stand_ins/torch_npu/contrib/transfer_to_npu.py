"""Importing this module makes "cuda" mean "npu"."""

from fusedadam.ascend.install import transfer_to_npu

transfer_to_npu()
