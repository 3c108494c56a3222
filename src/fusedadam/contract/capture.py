"""Whether a step can be captured in a CUDA graph. A value that the graph does not read from the device is frozen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fusedadam.contract.group_options import names_on_device
from fusedadam.rules.tracing import MAY_BE_ON_DEVICE

if TYPE_CHECKING:
    from fusedadam.contract.base import FusedOptimizer


def check_may_be_captured(optimizer: FusedOptimizer) -> None:
    where = "step() is being captured in a CUDA graph"
    for group in optimizer.param_groups:
        if not group.get("capturable"):
            raise RuntimeError(
                f"{where}, but step counts and lr live on the host and would be frozen; make the optimizer with "
                "capturable=True, and take a step before the capture"
            )
        if isinstance(group["lr"], Tensor) and group["lr"].device.type == "cpu":
            raise RuntimeError(f"{where}, but lr is a tensor on the CPU and would be frozen; move it to the device")
        read = [n for n in names_on_device(group) if n in optimizer.options and n not in MAY_BE_ON_DEVICE]
        if read:
            raise RuntimeError(
                f"{where}, but {', '.join(read)} would have to be read from the device; only lr and weight_decay may "
                "be tensors there, so give the others as numbers"
            )
        for param in group["params"]:
            step = optimizer.state[param].get("step") if param in optimizer.state else None
            if param.grad is not None and not (isinstance(step, Tensor) and step.device == param.device):
                raise RuntimeError(
                    f"{where}, but a parameter on {param.device} has no state there yet; take a step before the "
                    "capture (a CPU, or backend='eager', cannot be captured)"
                )
