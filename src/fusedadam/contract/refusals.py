"""What is refused because it would go wrong silently: complex parameters, captured steps, negative states.

- Complex parameters: an optimizer takes them if torch.optim defines its formula for them, and says so:
  ``takes_complex = True``. Real and imaginary parts are then updated as two real numbers (tensors/complex_numbers.py).
- Offload: kernels must reach host memory, and the eager backend has none of its own.
- CUDA graphs: a value that a captured step does not read from the device is frozen.
- States that are declared as never negative: codes of 8 bits would lose their signs. The source of a rule cannot tell
  without false alarms (Yogi's second moment, a difference, is never negative). So the rule takes a few steps as plain
  Python, on random numbers and with the options of the group, when ``storage=`` is chosen: a negative value is then a
  fact. The classes of this package are checked by tests instead.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedadam import backends
from fusedadam.contract.declarations import Group, names_on_device
from fusedadam.formats import names
from fusedadam.rules.rule import PARAM_FLAGS, PARAM_SCALARS
from fusedadam.rules.tracing import MAY_BE_ON_DEVICE
from fusedadam.tensors import host_memory

if TYPE_CHECKING:
    from fusedadam.contract.base import FusedOptimizer

# Options that only real numbers give a meaning to, and why
FOR_REALS = {
    "cautious": "it compares the signs of updates and gradients, and complex numbers have none",
    "update_clipping": "its authors define it for real gradients alone",
}


def check_param(optimizer: type[FusedOptimizer], group: Group, param: Tensor) -> None:
    """Refuses a parameter that cannot be in its group, as its options are now."""
    if param.is_complex():
        _check_complex(optimizer, group, param)
    optimizer._check_param(group, param)


def _check_complex(optimizer: type[FusedOptimizer], group: Group, param: Tensor) -> None:
    """Where the optimizer or one of its group's options is not defined for complex numbers."""
    dtype = names([param.dtype])
    if not optimizer.takes_complex:
        raise RuntimeError(
            f"param has dtype {dtype}, and the formula of {optimizer.__name__} is defined for real parameters alone; "
            "train it with another optimizer, such as AdamW or SGD, or store it as a real tensor: torch.view_as_real"
        )
    specialized = optimizer.specialized(group, param)
    if specialized.is_factored or specialized.product is not None:
        raise ValueError(
            f"param has dtype {dtype}, and the rule {specialized.rule.name} has rows, columns or matrices of real "
            "numbers; set takes_complex = False, or use row_sum and tensor_sum, which add up real and imaginary parts"
        )
    for option, why in FOR_REALS.items():
        if group.get(option):
            raise ValueError(
                f"{option}=True cannot be used with a param of dtype {dtype}: {why}; put complex parameters into a "
                f"group of their own, with {option}=False"
            )


def offloads(group: Group, device: torch.device) -> bool:
    """Whether the states of a parameter on this device go to host memory; refused where kernels do not reach that."""
    if not group.get("offload") or device.type == "meta":
        return False
    if device.type == "cpu" and device.type not in host_memory.DEVICES:
        return False
    backend, why = (group["backend"], None) if group.get("backend") else backends.best(device)
    if backend == "eager":
        why = "backend='eager' copies" if why is None else f"{why}, and the eager backend copies"
        raise ValueError(
            f"offload=True needs kernels that use host memory in place, and {why}; use backend='triton', or leave "
            "offload out"
        )
    if not host_memory.reaches(device):
        raise ValueError(
            f"offload=True needs a device whose kernels use page-locked host memory in place, and {device} does not; "
            "leave offload out, and save memory with storage='8bit'"
        )
    return True


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


STEPS, SHAPE = 4, (8, 32)


def check_signs(optimizer: type[FusedOptimizer], flags: Sequence[bool], hyper_parameters: Sequence[Any]) -> None:
    """Refuses a state that is declared with ``signed=False`` and becomes negative."""
    rule, random = optimizer.rule, torch.Generator("cpu").manual_seed(0)
    drawn = functools.partial(torch.randn, SHAPE, generator=random, dtype=torch.float64, device="cpu")
    param = drawn()
    values = {"param": param} | {name: state.new(param, {}) for name, state in optimizer.states.items()}
    options = [float(value) if isinstance(value, Tensor) else value for value in hyper_parameters]
    chosen = dict(zip(optimizer._flags, flags, strict=True)) | {name: ask(param) for name, ask in PARAM_FLAGS.items()}
    own = {name: ask(param, param.dtype) for name, ask in PARAM_SCALARS.items()}
    for step in range(1, STEPS + 1):
        values["grad"] = drawn()
        scalars = {**rule.scalars(step=step, **dict(zip(rule.hyper_parameters, options, strict=True))), **own}
        new = rule(
            **{name: values[name] for name in rule.roles},
            **{name: float(scalars[name]) for name in rule.scalar_names},
            **{name: chosen[name] for name in rule.flags},
        )
        values |= zip(rule.returned, new if isinstance(new, tuple) else (new,), strict=True)
        for name in (name for name, state in optimizer.states.items() if not state.signed and state.by == "element"):
            if (smallest := float(values[name].min())) < 0:
                raise ValueError(
                    f"{optimizer.__name__}.states[{name!r}] has signed=False, and was {smallest:.3g} in step {step} "
                    "with random gradients; leave signed=False out, or 8 bits would lose its sign"
                )
