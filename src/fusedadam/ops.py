"""The functions that rules and their scalars may call.

from fusedadam.ops import sqrt, tensor_sum, where
"""

from fusedadam.rules.clipping import clip_factor, clipped_by_norm, group_norm, tensor_norm, total_norm
from fusedadam.rules.ops import (
    abs,  # noqa: A004
    clamp,
    cos,
    divide,
    group_sum,
    largest,
    maximum,
    minimum,
    power,
    row_sum,
    sign,
    sqrt,
    sum_last,
    sum_second_last,
    tensor_sum,
    total,
    where,
)

__all__ = ["abs", "clamp", "cos", "divide", "maximum", "minimum", "power", "sign", "sqrt", "where"]
__all__ += ["group_sum", "largest", "row_sum", "sum_last", "sum_second_last", "tensor_sum", "total"]
__all__ += ["clip_factor", "clipped_by_norm", "group_norm", "tensor_norm", "total_norm"]
