"""One step in float64, by torch.optim, by the adamp package or by hand: no code is shared with the optimizers.

The reference keeps nothing from step to step. It starts from the values stored before the step, so rounding errors do
not accumulate, and its result can be compared to the last bit or two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import adamp
import torch
from torch import Tensor

from fusedadam.formats import compute_dtype
from tests.fuzz.judge import Expected, coarsest
from tests.meaning.by_hand import (
    AdafactorByHand,
    AdamPByHand,
    AdanByHand,
    AdEMAMixByHand,
    BertAdamByHand,
    EmaAdamByHand,
    LionByHand,
    norm_by_hand,
)

States = Mapping[str, Tensor]
STATES = {
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "Adam": ("exp_avg", "exp_avg_sq"),
    "EmaAdamW": ("exp_avg", "exp_avg_sq", "ema_params"),
    "AdamP": ("exp_avg", "exp_avg_sq"),
    "BertAdam": ("exp_avg", "exp_avg_sq"),
    "SGD": (),
    "RMSprop": ("square_avg",),
    "Adadelta": ("square_avg", "acc_delta"),
    "Lion": ("exp_avg",),
    "RAdam": ("exp_avg", "exp_avg_sq"),
    "NAdam": ("exp_avg", "exp_avg_sq", "mu_product"),
    "Adafactor": ("variance",),
    "Adan": ("exp_avg", "exp_avg_sq", "exp_avg_diff", "neg_pre_grad"),
    "AdEMAMix": ("exp_avg_fast", "exp_avg_slow", "exp_avg_sq"),
}
TORCHS = {  # the options of torch's own
    **dict.fromkeys(("AdamW", "Adam"), ("lr", "betas", "eps", "weight_decay", "amsgrad")),
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
    "RMSprop": ("lr", "alpha", "eps", "weight_decay", "momentum"),
    "Adadelta": ("lr", "rho", "eps", "weight_decay"),
    "RAdam": ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay"),
    "NAdam": ("lr", "betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay"),
    "Adafactor": ("lr", "beta2_decay", "eps", "d", "weight_decay"),
}
SMALLER = {"row_var": "row", "col_var": "column", "mu_product": "tensor"}  # states that leave out dimensions
L2 = {*TORCHS} - {"AdamW", "Adafactor"}  # whose weight decay is a penalty, unless an option says otherwise
AVERAGES = ("exp_avg", "exp_avg_fast", "exp_avg_slow", "neg_pre_grad")  # as large as gradients


def states_of(name: str, options: Mapping[str, Any], param: Tensor) -> tuple[str, ...]:
    """The states that an optimizer keeps for a parameter under these options."""
    if name == "Adafactor" and param.dim() > 1:
        return ("row_var", "col_var")
    more = {"max_exp_avg_sq": options.get("amsgrad"), "momentum_buffer": options.get("momentum")}
    return STATES[name] + tuple(state for state, is_on in more.items() if is_on)


@dataclass(frozen=True)
class Member:
    """A parameter that takes part in a step, as it is before: all tensors in float64."""

    param: Tensor
    grad: Tensor
    states: States
    done: int  # steps that were taken before
    options: Mapping[str, Any]
    dtype: torch.dtype  # that the parameter is stored in
    norm_of: Any  # those that have the same are clipped by one norm; None: it is not clipped


def expected_step(name: str, members: Sequence[Member], after: Sequence[States]) -> list[dict[str, Expected]]:
    """``after``: what the optimizer has stored; rules that sum go on with moments as they are stored."""
    step = STEPS[name]
    results = []
    for original, member, stored in zip(members, clipped(members), after, strict=True):
        # a parameter without elements stays as it is, and so do its states, but for what is counted with the steps
        new = step(member, stored) if member.param.numel() or name == "NAdam" else _roles(member)
        compute = coarsest(m.dtype for m in members if m is original or m.norm_of == member.norm_of is not None)
        results.append({role: Expected(v, _size(name, member, role, v), compute) for role, v in new.items()})
    return results


def clipped(members: Sequence[Member]) -> list[Member]:
    """With gradients as they enter the update: scaled down, and negated where the optimizer is to maximize."""
    results = []
    for member in members:
        grad, limit = member.grad, member.options["max_grad_norm"]
        if member.norm_of is not None:
            norm = norm_by_hand([m.grad for m in members if m.norm_of == member.norm_of])
            grad = grad * min(1.0, limit / (norm + 1e-6))
        results.append(replace(member, grad=-grad if member.options.get("maximize") else grad))
    return results


def _roles(member: Member) -> dict[str, Tensor]:
    return {"param": member.param, **member.states}


def _size(name: str, member: Member, role: str, value: Tensor) -> Tensor:
    """The number whose ulps an error is measured in: the largest term that went into the value."""
    if not value.numel():
        return value
    param, decay = member.param.abs(), member.options["weight_decay"]
    is_decoupled = member.options.get("decoupled", member.options.get("decoupled_weight_decay", name not in L2))
    penalty = name == "Adam" or not is_decoupled
    grad = member.grad.abs() + (decay * param if penalty else 0.0)
    size = torch.maximum(_roles(member)[role].abs(), value.abs())
    if role in SMALLER:
        return size
    if name == "Adan" and role in ("param", "exp_avg_sq", "exp_avg_diff"):
        return torch.maximum(size, _adan_sizes(member)[role])
    if role in ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "variance"):
        return torch.maximum(size, grad * grad)
    if role in AVERAGES:
        return torch.maximum(size, grad)
    if name == "Adafactor":  # relative to the size of the parameter, so not as if that were 0
        update = (value - (1 - float(member.options["lr"]) * decay) * member.param).abs()
        return torch.maximum(torch.maximum(size, param), 2 * update)
    # how large the update would be if first moment and gradient did not cancel
    states = {name: value.abs() if name != "ema_params" else value for name, value in member.states.items()}
    alone = replace(
        member, param=torch.zeros_like(param), grad=grad, states=states, options={**member.options, "weight_decay": 0.0}
    )
    results = STEPS[name](alone, {})
    cancelled: Any = 1.0
    if penalty:  # where it cancels the gradient, their rounding is much of what is left
        left = (member.grad + decay * member.param).abs()
        cancelled = (grad / left.clamp_min(torch.finfo(left.dtype).tiny)).clamp_min(1.0)
    if role in ("momentum_buffer", "acc_delta"):  # what is added is as large, and has been rounded before
        size = 2 * cancelled * (_roles(member)[role].abs() + value.abs() + results[role].abs())
        return torch.maximum(size, grad) if name == "SGD" else size
    update = 2 * results["param"].abs() * cancelled  # it is divided by what is left
    if name == "Lion":
        update = torch.where(_may_turn_around(member), 1e9, update)
    if name == "AdamP" and param.dim() > 1:  # a projection mixes the elements of a row
        rows = tuple(range(param.dim()))
        update, param = (t.amax(rows, keepdim=True).expand_as(param) for t in (update, param))
    return torch.maximum(torch.maximum(size, param), update)


def _may_turn_around(member: Member) -> Tensor:
    """Where the terms of Lion's update cancel so far that rounding decides about its sign."""
    beta1 = member.options["betas"][0]
    terms = beta1 * member.states["exp_avg"], (1 - beta1) * member.grad
    left, sizes = (terms[0] + terms[1]).abs(), terms[0].abs() + terms[1].abs()
    return (left <= 8 * torch.finfo(compute_dtype(member.dtype)).eps * sizes) & (sizes > 0)


def _adan_sizes(member: Member) -> dict[str, Tensor]:
    """The terms of Adan's differences, which may cancel, and of an update that is divided by what is left."""
    lr, (beta1, beta2, beta3), eps = (member.options[name] for name in ("lr", "betas", "eps"))
    grad, states, step = member.grad, member.states, member.done + 1
    change = grad + states["neg_pre_grad"] if member.done else torch.zeros_like(grad)
    changes = grad.abs() + states["neg_pre_grad"].abs() if member.done else torch.zeros_like(grad)
    ahead, aheads = grad + beta2 * change, grad.abs() + beta2 * changes
    mean = (beta1 * states["exp_avg"].abs() + (1 - beta1) * grad.abs()) / (1 - beta1**step)
    diff = (beta2 * states["exp_avg_diff"].abs() + (1 - beta2) * changes) / (1 - beta2**step)
    squares = beta3 * states["exp_avg_sq"] + (1 - beta3) * ahead * ahead
    tiny = torch.finfo(squares.dtype).tiny
    cancelled = 1 + (1 - beta3) * ahead.abs() * aheads / squares.clamp_min(tiny)
    update = lr * (mean + beta2 * diff) / ((squares / (1 - beta3**step)).sqrt() + eps)
    return {
        "param": torch.maximum(member.param.abs(), 2 * cancelled * update),
        "exp_avg_sq": aheads * aheads,
        "exp_avg_diff": changes,
    }


def _torch_step(name: str, member: Member, _: States) -> dict[str, Tensor]:
    """Of torch's own optimizer; EmaAdamW has neither ``amsgrad`` nor an average there."""
    param = torch.nn.Parameter(member.param.clone())
    optimizer = getattr(torch.optim, name)([param], foreach=False)
    group = optimizer.param_groups[0]  # torch checks options only when it is made
    group.update({option: {"amsgrad": False, **member.options}[option] for option in TORCHS[name]})
    if name == "Adafactor" and member.options["eps"][0] is None:  # that of the stored dtype, not of float64
        group["eps"] = (torch.finfo(member.dtype).eps, member.options["eps"][1])
    if name == "SGD" and member.done == 0:
        group["dampening"] = 0.0  # only from the second step on; its buffer is zeros, unless someone set it
    return _stepped(optimizer, param, member, torch.tensor(float(member.done)))


def _stepped(optimizer: Any, param: Tensor, member: Member, done: Any) -> dict[str, Tensor]:
    """The results of another package's optimizer, which goes on from the member's states."""
    names = [name for name in member.states if name != "ema_params"]
    optimizer.state[param] = {"step": done, **{name: member.states[name].clone() for name in names}}
    param.grad = member.grad.clone()
    optimizer.step()
    return {"param": param.detach(), **{name: optimizer.state[param][name] for name in names}}


def _adafactor_step(member: Member, stored: States) -> dict[str, Tensor]:
    """torch's; by hand where the second moment of a vector is stored in fewer bits than the step calculates with."""
    compute, variance = torch.finfo(compute_dtype(member.dtype)).eps, stored.get("variance")
    if variance is None or torch.finfo(variance.dtype).eps <= compute:
        return _torch_step("Adafactor", member, stored)
    eps1, eps2 = member.options["eps"]
    options = {name: member.options[name] for name in ("lr", "beta2_decay", "d", "weight_decay")}
    options["eps"] = (torch.finfo(member.dtype).eps if eps1 is None else eps1, eps2)
    rule = AdafactorByHand(member.param, **options)
    rule.as_stored = variance.double()
    return _by_hand(rule, member, v="variance")


def _ema_step(member: Member, stored: States) -> dict[str, Tensor]:
    """torch.optim.AdamW (or Adam) and an average by hand; all by hand where torch has no such option."""
    options = member.options
    if options["bias_correction"]:
        new = _torch_step("AdamW" if options["decoupled"] else "Adam", member, stored)
        step = member.done + 1
        decay = options["ema_decay"]
        decay = min(decay, (1 + step) / (10 + step)) if options["ema_warmup"] else decay
        return {**new, "ema_params": decay * member.states["ema_params"] + (1 - decay) * new["param"]}
    names = ("lr", "betas", "eps", "weight_decay", "ema_decay", "bias_correction")
    by_hand = EmaAdamByHand(
        member.param,
        **{name: options[name] for name in names},
        mode=int(options["decoupled"]),
        warmup=options["ema_warmup"],
    )
    return _by_hand(by_hand, member, **MOMENTS, s="ema_params")


def _adamp_step(member: Member, stored: States) -> dict[str, Tensor]:
    """The authors' package; by hand where the moments are stored in fewer bits than it calculates with."""
    names = ("lr", "betas", "eps", "weight_decay", "delta", "wd_ratio", "nesterov")
    options = {name: member.options[name] for name in names}
    compute = torch.finfo(compute_dtype(member.dtype)).eps
    if member.param.dim() > 1 and any(torch.finfo(value.dtype).eps > compute for value in stored.values()):
        by_hand = AdamPByHand(member.param, **options)
        by_hand.as_stored = tuple(stored[name].double() for name in ("exp_avg", "exp_avg_sq"))
        return _by_hand(by_hand, member, **MOMENTS)
    param = torch.nn.Parameter(member.param.clone())
    return _stepped(adamp.AdamP([param], **options), param, member, member.done)


def _bert_step(member: Member, _: States) -> dict[str, Tensor]:
    names = ("lr", "warmup", "t_total", "schedule", "b1", "b2", "e", "weight_decay")
    options = {name: member.options[name] for name in names}
    return _by_hand(BertAdamByHand(member.param, **options, max_grad_norm=None), member, **MOMENTS)


def _lion_step(member: Member, _: States) -> dict[str, Tensor]:
    rule = LionByHand(member.param, **{name: member.options[name] for name in ("lr", "betas", "weight_decay")})
    return _by_hand(rule, member, m="exp_avg")


def _adan_step(member: Member, _: States) -> dict[str, Tensor]:
    names = ("lr", "betas", "eps", "weight_decay", "no_prox")
    rule = AdanByHand(member.param, **{name: member.options[name] for name in names})
    rule.previous = -member.states["neg_pre_grad"] if member.done else None
    new = _by_hand(rule, member, m="exp_avg", n="exp_avg_sq", d="exp_avg_diff")
    return {**new, "neg_pre_grad": -member.grad}


def _ademamix_step(member: Member, _: States) -> dict[str, Tensor]:
    names = ("lr", "betas", "eps", "weight_decay", "alpha", "alpha_warmup", "beta3_warmup")
    rule = AdEMAMixByHand(member.param, **{name: member.options[name] for name in names})
    return _by_hand(rule, member, m="exp_avg_fast", s="exp_avg_slow", v="exp_avg_sq")


MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq"}


def _by_hand(rule: Any, member: Member, **states: str) -> dict[str, Tensor]:
    """``states``: the names of what the rule calls ``m``, ``v`` and so on."""
    rule.t = member.done
    for variable, name in states.items():
        setattr(rule, variable, member.states[name])
    rule.step(member.grad)
    return {"param": rule.p, **{name: getattr(rule, variable) for variable, name in states.items()}}


STEPS: dict[str, Callable[[Member, States], dict[str, Tensor]]] = {
    **{name: functools.partial(_torch_step, name) for name in TORCHS},
    "EmaAdamW": _ema_step,
    "AdamP": _adamp_step,
    "BertAdam": _bert_step,
    "Lion": _lion_step,
    "Adan": _adan_step,
    "AdEMAMix": _ademamix_step,
    "Adafactor": _adafactor_step,
}
