"""torch_npu's optimizers: ours, under their names, with their arguments and defaults. mindspeed.py has MindSpeed's."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required

from fusedadam import checks
from fusedadam.clipping import clip_grad_norm_
from fusedadam.contract.base import FusedOptimizer, Params
from fusedadam.contract.declarations import Group
from fusedadam.optimizers.adadelta import Adadelta
from fusedadam.optimizers.adamp import AdamP
from fusedadam.optimizers.adamw import Adam, AdamW
from fusedadam.optimizers.bert_adam import BertAdam
from fusedadam.optimizers.lamb import Lamb
from fusedadam.optimizers.rmsprop import RMSprop, RMSpropTF
from fusedadam.optimizers.sgd import SGD

__all__ = [
    "NpuFusedAdadelta",
    "NpuFusedAdam",
    "NpuFusedAdamP",
    "NpuFusedAdamW",
    "NpuFusedBertAdam",
    "NpuFusedLamb",
    "NpuFusedOptimizerBase",
    "NpuFusedRMSprop",
    "NpuFusedRMSpropTF",
    "NpuFusedSGD",
]

UNGIVEN_B2 = float("0.99")  # recognised by being this very object
LAMBS_WEIGHT_NORM = 10.0  # torch_npu clamps a parameter's norm to it


class NpuFusedOptimizerBase(torch.optim.Optimizer):
    """The base of torch_npu's optimizers: the methods that they have in addition to torch's.

    A class of your own overrides :meth:`step`, as with torch's base. torch_npu's way of writing one, on tensors into
    which it has combined all parameters, gradients and states, does not work: they do not exist here.

    Args:
        params: parameters or groups
        default: a dict of the options of all groups
    """

    is_fused_optimizer = True

    def __init__(self, params: Params, default: dict[str, Any]) -> None:
        super().__init__(params, default)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.step is torch.optim.Optimizer.step:
            cls.step = _without_combined_tensors  # type: ignore[assignment]

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Sets the gradients to zero, or with ``set_to_none`` to None."""
        super().zero_grad(set_to_none)

    def clip_grad_norm_fused_(self, max_norm: float, norm_type: float = 2) -> Tensor:
        """Scales all gradients in place so that their norm is at most ``max_norm``; returns the norm before."""
        return clip_grad_norm_((p for group in self.param_groups for p in group["params"]), max_norm, norm_type)


def _without_combined_tensors(self: NpuFusedOptimizerBase, closure: Any = None) -> None:
    raise NotImplementedError(
        f"{type(self).__name__} has no step(): torch_npu's combined tensors do not exist here; override step(), or "
        "write the update as a rule (CONTRIBUTING.md)"
    )


class NpuFusedAdamW(NpuFusedOptimizerBase, AdamW):
    """torch_npu's name for :class:`fusedadam.AdamW`.

    Parameters may be float32, float16, bfloat16 or float64, mixed, and may move or be replaced at any time.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = NpuFusedAdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> norm = optimizer.clip_grad_norm_fused_(1.0)
        >>> optimizer.step()
    """

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False,
    ) -> None:  # fmt: skip
        FusedOptimizer.__init__(
            self, params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad
        )  # fmt: skip


class NpuFusedAdam(NpuFusedOptimizerBase, Adam):
    """torch_npu's name for :class:`fusedadam.Adam`.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = NpuFusedAdam(model.parameters(), lr=2e-3, weight_decay=0.05)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0, amsgrad: bool = False,
    ) -> None:  # fmt: skip
        FusedOptimizer.__init__(
            self, params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad
        )  # fmt: skip


class NpuFusedAdamP(NpuFusedOptimizerBase, AdamP):
    """torch_npu's name for :class:`fusedadam.AdamP`.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = NpuFusedAdamP(model.parameters(), lr=2e-3, eps=1e-5, weight_decay=0.05)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0, delta: float = 0.1, wd_ratio: float = 0.1, nesterov: bool = False,
    ) -> None:  # fmt: skip
        FusedOptimizer.__init__(
            self, params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, delta=delta, wd_ratio=wd_ratio,
            nesterov=nesterov,
        )  # fmt: skip


class NpuFusedBertAdam(NpuFusedOptimizerBase, BertAdam):
    """torch_npu's name for :class:`fusedadam.BertAdam`, with ``b2=0.99``, as its page says.

    Gradients are clipped by each parameter's own norm, as in the code that the page cites; a group with
    ``"clip": "group"`` takes one norm over its gradients of one dtype, as torch_npu's released code does.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = NpuFusedBertAdam(model.parameters(), lr=0.01, warmup=0.1, t_total=20, b2=0.999)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self, params: Params, lr: float = 1e-3, warmup: float = -1, t_total: int = -1, schedule: str = "warmup_linear",
        b1: float = 0.9, b2: float = UNGIVEN_B2, e: float = 1e-6, weight_decay: float = 0.01,
        max_grad_norm: float = 1.0,
    ) -> None:  # fmt: skip
        FusedOptimizer.__init__(
            self, params, lr=lr, warmup=warmup, t_total=t_total, schedule=schedule, b1=b1, b2=b2, e=e,
            weight_decay=weight_decay, max_grad_norm=max_grad_norm,
        )  # fmt: skip

    def add_param_group(self, param_group: Group) -> None:
        if isinstance(param_group, dict) and {**self.defaults, **param_group}["b2"] is UNGIVEN_B2:
            _warn_about_b2()
        super().add_param_group(param_group)


@functools.cache
def _warn_about_b2() -> None:
    warnings.warn(
        "NpuFusedBertAdam: b2 is not given, and is 0.99, as the class's page says; torch_npu's released code and the "
        "code that the page cites use 0.999. Pass b2=0.999 for their results, or b2=0.99 to keep the page's.",
        stacklevel=6,  # where the optimizer is made
    )


class NpuFusedSGD(NpuFusedOptimizerBase, SGD):
    """torch_npu's name for :class:`fusedadam.SGD`. ``lr`` must be given, here or in every group.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = NpuFusedSGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    options = SGD.options | {"lr": checks.unless(required, checks.number)}  # torch names the group that has none

    def __init__(
        self, params: Params, lr: float = required,  # type: ignore[assignment]
        momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False,
    ) -> None:  # fmt: skip
        SGD.__init__(self, params, lr, momentum, dampening, weight_decay, nesterov)


class NpuFusedAdadelta(NpuFusedOptimizerBase, Adadelta):
    """torch_npu's name for :class:`fusedadam.Adadelta`.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = NpuFusedAdadelta(model.parameters(), rho=0.95)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self, params: Params, lr: float = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0
    ) -> None:  # fmt: skip
        FusedOptimizer.__init__(self, params, lr=lr, rho=rho, eps=eps, weight_decay=weight_decay)


class NpuFusedRMSprop(NpuFusedOptimizerBase, RMSprop):
    """torch_npu's name for :class:`fusedadam.RMSprop`.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = NpuFusedRMSprop(model.parameters(), momentum=0.9, centered=True)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self, params: Params, lr: float = 1e-2, alpha: float = 0.99, eps: float = 1e-8, weight_decay: float = 0,
        momentum: float = 0, centered: bool = False,
    ) -> None:  # fmt: skip
        FusedOptimizer.__init__(
            self, params, lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum, centered=centered
        )  # fmt: skip


class NpuFusedRMSpropTF(NpuFusedOptimizerBase, RMSpropTF):
    """torch_npu's name for :class:`fusedadam.RMSpropTF`.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = NpuFusedRMSpropTF(model.parameters(), momentum=0.9)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self, params: Params, lr: float = 1e-2, alpha: float = 0.9, eps: float = 1e-10, weight_decay: float = 0,
        momentum: float = 0.0, centered: bool = False, decoupled_decay: bool = False, lr_in_momentum: bool = True,
    ) -> None:  # fmt: skip
        FusedOptimizer.__init__(
            self, params, lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum, centered=centered,
            decoupled_decay=decoupled_decay, lr_in_momentum=lr_in_momentum,
        )  # fmt: skip


class NpuFusedLamb(NpuFusedOptimizerBase, Lamb):
    """torch_npu's Lamb: :class:`fusedadam.Lamb` without bias correction, and with a weight norm of at most 10.

    Args:
        adam: a trust ratio of 1
        use_global_grad_norm: divide the gradients by the norm of all of them together where that is above 1

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = NpuFusedLamb(model.parameters(), weight_decay=0.01, use_global_grad_norm=True)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    fixed = {"bias_correction": False}
    derived = Lamb.derived | {"max_weight_norm": lambda group: LAMBS_WEIGHT_NORM}

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
        weight_decay: float = 0, adam: bool = False, use_global_grad_norm: bool = False,
    ) -> None:  # fmt: skip
        FusedOptimizer.__init__(
            self, params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, adam=adam,
            use_global_grad_norm=use_global_grad_norm,
        )  # fmt: skip
