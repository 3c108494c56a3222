"""The functions that rules and their scalars may call.

from fusedadam.ops import sqrt, tensor_sum, where
"""

from fusedadam.rules.clipping import (
    clip_factor,
    clipped_by_norm,
    group_norm,
    maximized_and_clipped,
    tensor_norm,
    total_norm,
)
from fusedadam.rules.ops import (
    abs,  # noqa: A004
    clamp,
    cos,
    divide,
    exp,
    group_sum,
    largest,
    log,
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

__all__ = ["abs", "clamp", "cos", "divide", "exp", "log", "maximum", "minimum", "power", "sign"]
__all__ += ["sqrt", "where"]
__all__ += ["group_sum", "largest", "row_sum", "sum_last", "sum_second_last", "tensor_sum", "total"]
__all__ += ["clip_factor", "clipped_by_norm", "group_norm", "maximized_and_clipped", "tensor_norm", "total_norm"]
