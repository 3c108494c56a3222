"""Checks that refuse bad input before anything is written, with an error that names the argument and what is allowed.

The types of errors are torch.optim's: ValueError for a value out of range, TypeError for an argument of the wrong kind,
RuntimeError for tensors that do not fit.

options.py  options and arguments: numbers, flags, names
tensors.py  tensors, which a kernel is to read or write
"""

from fusedadam.checks.options import *
from fusedadam.checks.tensors import *
