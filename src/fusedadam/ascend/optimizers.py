"""torch_npu's optimizers: ours, under their names, with their arguments and defaults. mindspeed.py has MindSpeed's.

Most names are one line: our class, the arguments that torch_npu's has, in its order, and those of the example.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
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
from fusedadam.optimizers.muon import BETAS, Muon
from fusedadam.optimizers.rmsprop import RMSprop, RMSpropTF
from fusedadam.optimizers.sgd import SGD
from fusedadam.rules.newton_schulz import KELLER

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
    "_DistributedMuon",
]

UNGIVEN_B2 = float("0.99")  # recognised by being this very object
LAMBS_WEIGHT_NORM = 10.0  # torch_npu clamps a parameter's norm to it
DOC = """torch_npu's name for :class:`fusedadam.{ours}`.

    Parameters may be float32, float16, bfloat16 or float64, mixed, and may move or be replaced at any time.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = {name}(model.parameters(), {example})
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> norm = optimizer.clip_grad_norm_fused_(1.0)
        >>> optimizer.step()
    """


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

    def __init_subclass__(
        cls, takes: str = "", defaults: Mapping[str, Any] | None = None, example: str = "", **kwargs: Any
    ) -> None:
        """``takes``: the arguments, in their order; ``defaults``: those that differ from ours."""
        super().__init_subclass__(**kwargs)
        ours = cls.__bases__[-1]
        if takes:
            cls.__init__ = _init(ours, takes.split(), defaults or {})  # type: ignore[method-assign]
        if example:
            cls.__doc__ = DOC.format(ours=ours.__name__, name=cls.__name__, example=example)
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


def _init(ours: type, takes: list[str], defaults: Mapping[str, Any]) -> Callable[..., None]:
    """An ``__init__`` with these arguments; whatever else our class takes is left out, as in torch_npu."""
    known = inspect.signature(ours).parameters
    listed = [inspect.Parameter("self", by_position := inspect.Parameter.POSITIONAL_OR_KEYWORD), known["params"]]
    for name in takes:
        listed.append(known[name].replace(kind=by_position, default=defaults.get(name, known[name].default)))
    signature = inspect.Signature(listed, return_annotation=None)

    def __init__(self: FusedOptimizer, *args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            error.args = (f"{type(self).__name__}.__init__() {error}",)
            raise
        bound.apply_defaults()
        FusedOptimizer.__init__(**bound.arguments)

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    return __init__


ADAM, RMSPROP = "lr betas eps weight_decay ", "lr alpha eps weight_decay momentum centered "


# fmt: off
class NpuFusedAdamW(NpuFusedOptimizerBase, AdamW, takes=ADAM + "amsgrad", example="lr=2e-3, weight_decay=0.05"): ...
class NpuFusedAdam(NpuFusedOptimizerBase, Adam, takes=ADAM + "amsgrad", example="lr=2e-3, weight_decay=0.05"): ...
class NpuFusedAdamP(NpuFusedOptimizerBase, AdamP, takes=ADAM + "delta wd_ratio nesterov", example="delta=0.2"): ...
class NpuFusedAdadelta(NpuFusedOptimizerBase, Adadelta, takes="lr rho eps weight_decay", example="rho=0.95"): ...
class NpuFusedRMSprop(NpuFusedOptimizerBase, RMSprop, takes=RMSPROP, example="momentum=0.9, centered=True"): ...
class NpuFusedRMSpropTF(
    NpuFusedOptimizerBase, RMSpropTF, takes=RMSPROP + "decoupled_decay lr_in_momentum", example="momentum=0.9"
): ...
# fmt: on


class NpuFusedBertAdam(
    NpuFusedOptimizerBase, BertAdam, takes="lr warmup t_total schedule b1 b2 e weight_decay max_grad_norm",
    defaults={"b2": UNGIVEN_B2},
):  # fmt: skip
    """torch_npu's name for :class:`fusedadam.BertAdam`, with ``b2=0.99``, as its page says.

    Gradients are clipped by each parameter's own norm, as in the code that the page cites; a group with
    ``"clip": "group"`` takes one norm over its gradients of one dtype, as torch_npu's released code does.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = NpuFusedBertAdam(model.parameters(), lr=0.01, warmup=0.1, t_total=20, b2=0.999)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

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


class NpuFusedLamb(
    NpuFusedOptimizerBase, Lamb, takes=ADAM + "adam use_global_grad_norm", defaults={"weight_decay": 0}
):  # fmt: skip
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


def _refuse_others(group: Group, param: Tensor) -> None:
    if param.dim() != 2:
        raise ValueError(
            f"a parameter has shape {tuple(param.shape)}, and _DistributedMuon takes matrices alone; give others to "
            "another optimizer, or use fusedadam.Muon, which takes stacks and convolutions"
        )


class _DistributedMuon(Muon):
    """torch_npu's name for :class:`fusedadam.Muon`, for matrices alone, whole or sharded in any way.

    Args:
        process_group: accepted, but without effect: each matrix is multiplied by the processes of its own mesh

    Example:
        >>> model = torch.nn.Linear(2, 3, bias=False)
        >>> optimizer = _DistributedMuon(model.parameters(), lr=0.02)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    derived = Muon.derived | {  # it has no arguments for AdamW, which it never takes
        "use_muon": lambda group: True,
        "beta1": lambda group: BETAS[0],
        "beta2": lambda group: BETAS[1],
    }
    _check_param = staticmethod(_refuse_others)

    def __init__(
        self, params: Params, lr: float | Tensor = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95,
        nesterov: bool = True, ns_coefficients: Sequence[float] = KELLER, eps: float = 1e-7, ns_steps: int = 5,
        adjust_lr_fn: str | None = None, process_group: Any = None,
    ) -> None:  # fmt: skip
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            kind = type(process_group).__name__
            raise TypeError(f"process_group is a {kind}; it must be a torch.distributed.ProcessGroup, or None")
        FusedOptimizer.__init__(
            self, params, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov,
            ns_coefficients=ns_coefficients, eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn, use_muon=True,
            betas=BETAS,
        )  # fmt: skip

    def add_param_group(self, param_group: Group) -> None:
        if isinstance(param_group, dict) and param_group.get("use_muon", True) is not True:
            raise ValueError(
                f"use_muon={param_group['use_muon']!r}: _DistributedMuon has no AdamW; give such parameters to another "
                "optimizer, or use fusedadam.Muon, which has it"
            )
        FusedOptimizer.add_param_group(self, param_group)  # Muon's own defaults are of another package
