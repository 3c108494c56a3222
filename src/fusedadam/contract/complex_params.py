"""Complex parameters: which optimizers and which of their options take them.

An optimizer does if torch.optim defines its formula for them, and says so: ``takes_complex = True``. Their real and
imaginary parts are then updated as two real numbers (tensors/complex_numbers.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fusedadam.contract.declarations import Group
from fusedadam.formats import names

if TYPE_CHECKING:
    from fusedadam.contract.base import FusedOptimizer

# Options that only real numbers give a meaning to, and why
FOR_REALS = {
    "cautious": "it compares the signs of updates and gradients, and complex numbers have none",
    "update_clipping": "its authors define it for real gradients alone",
}


def check(optimizer: type[FusedOptimizer], group: Group, param: Tensor) -> None:
    """Refuses a complex parameter where the optimizer or one of its group's options is not defined for it."""
    if not param.is_complex():
        return
    dtype = names([param.dtype])
    if not optimizer.takes_complex:
        raise RuntimeError(
            f"param has dtype {dtype}, and the formula of {optimizer.__name__} is defined for real parameters alone; "
            "train it with another optimizer, such as AdamW or SGD, or store it as a real tensor: torch.view_as_real"
        )
    for option, why in FOR_REALS.items():
        if group.get(option):
            raise ValueError(
                f"{option}=True cannot be used with a param of dtype {dtype}: {why}; put complex parameters into a "
                f"group of their own, with {option}=False"
            )
