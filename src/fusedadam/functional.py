"""The updates as functions on your own tensors, in place. Each role is one tensor, or a list of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fusedadam import backends, checks
from fusedadam.engine.backend import Backend
from fusedadam.engine.kept_launches import KeptLaunches, LaunchCache
from fusedadam.engine.launch import Launches
from fusedadam.engine.member import Member
from fusedadam.optimizers.adamw import adam
from fusedadam.optimizers.ema_adamw import ema_adam
from fusedadam.rules.rule import Rule
from fusedadam.tensors.transfer import outside_inference_mode

__all__ = ["adamw_", "ema_adam_"]

LAUNCHES = LaunchCache(most=16)

Tensors: TypeAlias = Tensor | Sequence[Tensor]
Step: TypeAlias = int | Tensor | Sequence[int | Tensor]


def adamw_(
    param: Tensors, grad: Tensors, exp_avg: Tensors, exp_avg_sq: Tensors, max_exp_avg_sq: Tensors | None = None, *,
    step: Step, lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, weight_decay: float = 0.0,
    eps: float = 1e-8, amsgrad: bool = False, maximize: bool = False, backend: str | None = None,
) -> None:  # fmt: skip
    """One step of AdamW, in place.

    Every tensor may be float32, float16, bfloat16 or float64, each its own; arithmetic is in float32 (float64 if the
    parameter is), and each result is rounded once. Lists are updated together, in one launch for each device and mix
    of dtypes.

    Args:
        param: the parameter, or a list of them; it is updated
        grad: the gradient, or a list of them; it is only read
        exp_avg: the first moment, or a list of them; it is updated
        exp_avg_sq: the second moment, or a list of them; it is updated
        max_exp_avg_sq: AMSGrad's running maximum, required with ``amsgrad``, otherwise unused
        step: which step this is, the first being 1: an int, an integer tensor of one element, or a list of them
        lr: learning rate
        beta1: decay of the first moment
        beta2: decay of the second moment
        weight_decay: decoupled weight decay
        eps: added to the denominator
        amsgrad: divide by the largest second moment so far
        maximize: ascend the gradient instead of descending it
        backend: ``"numba"``, ``"triton"``, ``"eager"``, or None to choose by device

    Example:
        >>> param, grad = torch.ones(3), torch.ones(3)
        >>> exp_avg, exp_avg_sq = torch.zeros(3), torch.zeros(3)
        >>> adamw_(param, grad, exp_avg, exp_avg_sq, step=1, lr=0.5)
        >>> param
        tensor([0.5000, 0.5000, 0.5000])
    """
    flags = adamw_flags(amsgrad, maximize)
    roles = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if amsgrad:
        if max_exp_avg_sq is None:
            raise ValueError("max_exp_avg_sq is None, but amsgrad=True keeps its running maximum there; pass a tensor")
        roles["max_exp_avg_sq"] = max_exp_avg_sq
    options = adam_options(lr, beta1, beta2, weight_decay, eps)
    Update(adam, roles, flags, step, options, backend).run()


def ema_adam_(
    param: Tensors, grad: Tensors, exp_avg: Tensors, exp_avg_sq: Tensors, ema: Tensors, *,
    step: Step, lr: float = 1e-3, ema_decay: float = 0.9999, beta1: float = 0.9, beta2: float = 0.999,
    eps: float = 1e-8, mode: int = 1, bias_correction: bool = True, weight_decay: float = 0.0,
    backend: str | None = None,
) -> None:  # fmt: skip
    """One step of Adam or AdamW and of the average of the updated parameter, in place. Otherwise as :func:`adamw_`.

    Args:
        param, grad, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps, backend: as for :func:`adamw_`
        ema: the average, or a list of them; it is updated
        ema_decay: how much of the average is kept, in [0, 1]
        mode: 1 for AdamW, 0 for Adam
        bias_correction: divide the moments by :math:`1 - \\beta^t`
        weight_decay: decoupled with ``mode=1``, added to the gradient with ``mode=0``

    Example:
        >>> param, grad, ema = torch.ones(2), torch.ones(2), torch.ones(2)
        >>> ema_adam_(param, grad, torch.zeros(2), torch.zeros(2), ema, step=1, lr=0.5, ema_decay=0.5)
        >>> ema
        tensor([0.7500, 0.7500])
    """
    flags, options = ema_choices(lr, ema_decay, beta1, beta2, eps, mode, bias_correction, weight_decay)
    roles = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "ema": ema}
    Update(ema_adam, roles, flags, step, options, backend, {"ema": "ema_params"}).run()


def adam_options(lr: Any, beta1: Any, beta2: Any, weight_decay: Any, eps: Any) -> dict[str, float]:
    return {
        "lr": checks.number("lr", lr),
        "beta1": checks.number("beta1", beta1, below=1.0),
        "beta2": checks.number("beta2", beta2, below=1.0),
        "weight_decay": checks.number("weight_decay", weight_decay),
        "eps": checks.number("eps", eps),
        "max_grad_norm": math.inf,
    }


def adamw_flags(amsgrad: Any, maximize: Any) -> dict[str, bool]:
    checks.boolean("amsgrad", amsgrad)
    checks.boolean("maximize", maximize)
    return {"amsgrad": amsgrad, "maximize": maximize, "decoupled": True, "clipped": False}


def ema_choices(
    lr: Any, ema_decay: Any, beta1: Any, beta2: Any, eps: Any, mode: Any, bias_correction: Any, weight_decay: Any
) -> tuple[dict[str, bool], dict[str, float]]:
    """The flags and options of an EMA operator, checked."""
    checks.boolean("bias_correction", bias_correction)
    checks.mode(mode)
    options = adam_options(lr, beta1, beta2, weight_decay, eps)
    options |= {
        "ema_decay": checks.fraction("ema_decay", ema_decay),
        "ema_warmup": 0.0,
        "bias_correction": float(bias_correction),
    }
    return {"decoupled": mode == 1, "clipped": False}, options


class Update:
    """One step on tensors that the caller holds. Making it checks everything; only ``run`` writes.

    ``arguments`` have the caller's names; ``role_of`` maps a name to its role where they differ. ``check``: what the
    caller requires beyond what every update does. It is called before all other checks, but not again for arguments
    like those of an earlier call: it may depend on their names, types, dtypes, shapes and devices, and on nothing else.
    """

    def __init__(
        self,
        rule: Rule,
        arguments: Mapping[str, Tensors],
        flags: Mapping[str, bool],
        step: Step,
        options: Mapping[str, float],
        backend: str | None = None,
        role_of: Mapping[str, str] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._rule, self._flags, self._backend = rule, flags, backend
        self._options = tuple(options[name] for name in rule.hyper_parameters)
        self._lists = {
            name: [given] if isinstance(given, Tensor) else _listed(given) for name, given in arguments.items()
        }
        self._roles = [*arguments] if role_of is None else [role_of.get(name, name) for name in arguments]
        self._flat = [tensor for tensors in self._lists.values() for tensor in tensors]
        likeness = (_likeness(given, *own) for given, own in zip(arguments.values(), self._lists.items(), strict=True))
        self._key = (rule, *flags.values(), backend, *likeness)
        self._kept = LAUNCHES.take(self._key, self._flat)
        if self._kept is None:
            check()
            _check_lists(arguments, self._lists, dict(zip(arguments, self._roles, strict=True)))
        if self._kept is None or self._kept.may_share_memory:
            checks.no_shared_memory(self.tensors)
        if self._kept is None:
            self._chosen()
        self._steps = _steps(step, len(self._all("param")))

    @property
    def tensors(self) -> list[tuple[str, Tensor]]:
        """All tensors, with their names."""
        return [(name, tensor) for name, tensors in self._lists.items() for tensor in tensors]

    @property
    def device(self) -> torch.device:
        return self._all("param")[0].device

    def run(self) -> None:
        checks.not_captured("this operator cannot be captured in a CUDA graph: its step and lr would be frozen")
        kept, self._kept = self._kept, None
        if kept is None or not kept.is_for_this_stream:
            kept = self._made()
        launches = kept.launches
        scalars, order = self._rule.scalars_of([(self._options, float(step)) for step in self._steps])
        launches.set_scalars(scalars, np.array(order))
        written = [tensor for role in kept.outputs for tensor in self._all(role)]
        with torch.no_grad():
            kept.run(self._by_member() if launches.needs_tensors else (), written)
        LAUNCHES.give_back(self._key, kept)

    def give_back(self) -> None:
        """Leaves what was kept from earlier calls to the next one, if this update will not be run."""
        if self._kept is not None:
            LAUNCHES.give_back(self._key, self._kept)
            self._kept = None

    def _all(self, role: str) -> list[Tensor]:
        count = len(self._flat) // len(self._roles)
        first = self._roles.index(role) * count
        return self._flat[first : first + count]

    def _chosen(self) -> list[Backend]:
        return [backends.choose(param.device, self._backend) for param in self._all("param")]

    def _by_member(self) -> list[dict[str, Tensor]]:
        return [dict(zip(self._roles, each, strict=True)) for each in zip(*self._lists.values(), strict=True)]

    def _made(self) -> KeptLaunches:
        specialized = self._rule.specialize(self._flags)
        members = [Member(specialized, b, r) for b, r in zip(self._chosen(), self._by_member(), strict=True)]
        with outside_inference_mode():  # kept tables are written again in later calls
            return KeptLaunches(Launches(members), self._flat, self._roles)


def _listed(given: Any) -> list[Any]:
    """Anything else than a list is refused later."""
    return list(given) if isinstance(given, (list, tuple)) else []


def _likeness(given: Any, name: str, tensors: list[Any]) -> tuple[Any, ...]:
    """Equal for arguments of this name that are both tensors or both lists, of the same length, and begin alike."""
    if not tensors or not isinstance(tensors[0], Tensor):
        return (name,)
    return name, given is tensors[0], len(tensors), tensors[0].shape, tensors[0].dtype


def _check_lists(
    arguments: Mapping[str, Tensors], lists: Mapping[str, list[Tensor]], role_of: Mapping[str, str]
) -> None:
    """Raises unless each argument is a tensor or a list of them, all of the same length, and every tensor fits."""
    param = next(name for name, role in role_of.items() if role == "param")
    for name, given in arguments.items():
        if not isinstance(given, (Tensor, list, tuple)):
            raise TypeError(f"{name} is a {type(given).__name__}; it must be a torch.Tensor or a list of them")
    count = len(lists[param])
    for name, tensors in lists.items():
        is_one = isinstance(arguments[name], Tensor)
        if is_one != isinstance(arguments[param], Tensor) or len(tensors) != count:
            raise ValueError(f"{name} must be what {param} is: one tensor, or a list of {count}")
        for k, tensor in enumerate(tensors):
            check = checks.tensor if role_of[name] == "grad" else checks.written
            check(name if is_one else f"{name}[{k}]", tensor)
    for k in range(count):
        checks.alike({name: tensors[k] for name, tensors in lists.items()}, param, f"[{k}] " if count > 1 else "")


def _steps(step: Step, count: int) -> list[int]:
    """One for all tensors, or one for each."""
    if not isinstance(step, (list, tuple)):
        return [_one_step(step)]
    if len(step) != count:
        raise ValueError(
            f"step is a list of {len(step)}, but there are {count} tensors; give one step, or one for each"
        )
    return [_one_step(s) for s in step]


def _one_step(step: Any) -> int:
    if isinstance(step, Tensor):
        if step.numel() != 1 or step.dtype.is_floating_point or step.dtype.is_complex or step.dtype == torch.bool:
            raise TypeError(f"step is a tensor of shape {tuple(step.shape)} and {step.dtype}; it must be one integer")
        if step.device.type == "meta":
            raise RuntimeError("step is a meta tensor and has no value; it must be on a device")
        step = int(step.item())
    if isinstance(step, bool) or not isinstance(step, (int, np.integer)):
        raise TypeError(f"step={step!r} is a {type(step).__name__}; it must be an int or an int64 tensor")
    if not 1 <= step < 2**63:
        raise ValueError(f"step={step} is out of range; it must be an int64, and the first step is 1")
    return int(step)
