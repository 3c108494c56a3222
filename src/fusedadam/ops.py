"""The functions that rules and their scalars may call.

from fusedadam.ops import sqrt, tensor_sum, where
"""

from fusedadam.rules import clipping
from fusedadam.rules import ops as elementary
from fusedadam.rules.clipping import *
from fusedadam.rules.ops import *

__all__: list[str] = []
__all__ += elementary.__all__
__all__ += clipping.__all__
