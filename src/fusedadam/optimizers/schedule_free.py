"""ScheduleFreeAdamW: AdamW that needs no decaying learning rate (https://arxiv.org/abs/2405.15682)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedadam import checks
from fusedadam.contract import role_arrays, wrappers
from fusedadam.contract.base import FusedOptimizer, Params
from fusedadam.contract.common_options import Common, Unpack, takes
from fusedadam.contract.declarations import DERIVED, OPTIONS, Group, State
from fusedadam.formats.tensors import split_of, store
from fusedadam.rules.clipping import maximized_and_clipped
from fusedadam.rules.ops import divide, minimum, sqrt, where
from fusedadam.rules.rule import Flag, Scalar, Value, Values, rule
from fusedadam.tensors.shards import local


# fmt: off
def schedule_free_scalars(
    step: Scalar, lr: Scalar, beta1: Scalar, beta2: Scalar, eps: Scalar, weight_decay: Scalar, warmup: Scalar,
    max_grad_norm: Scalar,
) -> dict[str, Any]:
    # a step counts in the average by the square of its warm-up; ``weights`` is the sum of these squares so far
    warm = minimum(divide(step, warmup), 1.0)
    squares = divide(step * (step + 1) * (2 * step + 1), 6 * warmup * warmup)
    weights = where(step < warmup, squares, divide((warmup + 1) * (2 * warmup + 1), 6 * warmup) + (step - warmup))
    share = divide(warm * warm, weights)
    return {
        "lr": lr * warm, "share": share, "forward": lr * warm * (1 - beta1 * (1 - share)),
        "beta2": beta2, "beta2c": 1 - beta2, "debias2": 1 / sqrt(1 - beta2**step), "eps": eps,
        "weight_decay": weight_decay, "max_grad_norm": max_grad_norm,
    }


@rule(scalars=schedule_free_scalars, reports=("grad_norm",), opening=maximized_and_clipped)
def schedule_free(
    param: Value, grad: Value, z: Value, exp_avg_sq: Value, *,
    lr: Scalar, share: Scalar, forward: Scalar, beta2: Scalar, beta2c: Scalar, debias2: Scalar, eps: Scalar,
    weight_decay: Scalar, max_grad_norm: Scalar, maximize: Flag, clipped: Flag,
) -> Values:
    exp_avg_sq = beta2 * exp_avg_sq + beta2c * grad * grad
    update = grad / (sqrt(exp_avg_sq) * debias2 + eps) + weight_decay * param
    param = param + share * (z - param) - forward * update
    z = z - lr * update
    return param, z, exp_avg_sq
# fmt: on


def betas_with_average(name: str, value: Any) -> None:
    checks.betas(name, value)
    if float(value[0]) == 0:
        raise ValueError(f"{name}={value!r} begins with 0, and so the parameters would hold nothing of the average")


class ScheduleFreeAdamW(FusedOptimizer):
    r"""Schedule-Free AdamW (`arXiv 2405.15682 <https://arxiv.org/abs/2405.15682>`_): a constant learning rate after the
    warm-up, and an average of the weights in the place of momentum and decay.

    .. math::
        u_t = \frac{g(y_t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon} + \lambda y_t, \quad
        z_{t+1} = z_t - \eta_t u_t, \quad x_{t+1} = (1 - c_t) x_t + c_t z_{t+1}, \quad
        y_{t+1} = (1 - \beta_1) z_{t+1} + \beta_1 x_{t+1}, \quad \eta_t = \eta \min(t / T, 1), \quad
        c_t = \frac{\min(t / T, 1)^2}{\sum_{i \le t} \min(i / T, 1)^2}

    The parameters hold :math:`y`, where gradients are taken, and after :meth:`eval` the average :math:`x`, the
    weights to evaluate. Call :meth:`eval` before you evaluate or save the model, and :meth:`train` before you continue
    training.

    Args:
        params, eps: as for :class:`AdamW`
        lr: learning rate :math:`\eta` after the warm-up; the authors recommend one to ten times AdamW's
        betas: how close :math:`y` is to the average, and the decay of the second moment
        weight_decay: :math:`\lambda`, at :math:`y`
        warmup_steps: :math:`T`, the steps in which the learning rate grows
        max_grad_norm, maximize, foreach, capturable, differentiable, fused: as for :class:`AdamW`
        state_dtype, storage, offload, seed, skip_nonfinite, backend: as for :class:`AdamW`

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = ScheduleFreeAdamW(model.parameters(), lr=2.5e-3, warmup_steps=100)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.eval()
        >>> averaged = model(torch.ones(4, 2))
        >>> optimizer.train()
    """

    rule = schedule_free
    states = {"z": State(initial="param"), "exp_avg_sq": State(signed=False, decay="beta2")}
    options = OPTIONS | {
        "betas": betas_with_average, "eps": checks.number, "warmup_steps": checks.count, "train_mode": checks.boolean,
    }  # fmt: skip
    derived = DERIVED | {"warmup": lambda group: max(1, group["warmup_steps"])}

    @takes(Common)
    def __init__(
        self, params: Params, lr: float | Tensor = 2.5e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, warmup_steps: int = 0, **common: Unpack[Common],
    ) -> None: ...  # fmt: skip

    _trained: dict[Tensor, Tensor] = {}  # y while the parameters hold x

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):  # not among the defaults, which are the arguments of __init__
            param_group.setdefault("train_mode", True)
        super().add_param_group(param_group)

    def eval(self) -> None:
        """Puts the averages into the parameters, to evaluate or save the model. Steps are refused until
        :meth:`train`."""
        self._switch(to_train=False)

    def train(self) -> None:
        """Puts the trained weights back into the parameters, with the same bits if nobody has written to them since
        :meth:`eval`."""
        self._switch(to_train=True)

    @torch.no_grad()
    def _switch(self, to_train: bool) -> None:
        wrappers.check_has_all_averages(self)
        self._before_reading()
        groups = [group for group in self.param_groups if bool(group["train_mode"]) != to_train]
        moved = [(p, group) for group in groups for p in group["params"] if "z" in self.state.get(p, {})]
        if to_train:
            # all of them before any is written: an error, as for want of memory, leaves the parameters as they are
            for (param, _), y in zip(moved, [self._y(*each) for each in moved], strict=True):
                self._put_y(param, y)
            self._trained = {}
        else:
            self._put_averages(moved)
        for group in groups:
            group["train_mode"] = to_train
        wrappers.drop_gathered(wrappers.fsdp_modules([param for param, _ in moved]))

    def _put_averages(self, moved: list[tuple[Tensor, Group]]) -> None:
        trained: dict[Tensor, Tensor] = {}
        try:
            for param, group in moved:
                trained[param] = local(param.detach()).clone()
                local(param).copy_(self._x(trained[param], param, group))
        except BaseException:  # half of the averages would be trained as if they were weights
            for param, y in trained.items():
                local(param).copy_(y)
            raise
        self._trained = {**self._trained, **trained}

    def _x(self, y: Tensor, param: Tensor, group: Group) -> Tensor:
        """The average that belongs to ``y``, in the dtype of ``y``."""
        whole, beta1 = role_arrays.weight_of(y, self.state[param]), float(group["betas"][0])
        z = self._z(param, whole)
        return (z + (whole - z) / beta1).to(y.dtype)

    def _y(self, param: Tensor, group: Group) -> Tensor:
        """The very bits from before :meth:`eval`, or what belongs to the average, in float32 at least."""
        y, x = self._trained.get(param), local(param.detach())
        # compared by value: a write through ``param.data`` leaves no trace, and beta1 may have changed since
        if y is not None and torch.equal(self._x(y, param, group).to(x.device, x.dtype), x):
            return y
        z = self._z(param, x)
        value: Tensor = z + float(group["betas"][0]) * (x.to(z.dtype) - z)
        return value

    def _put_y(self, param: Tensor, y: Tensor) -> None:
        here, low = local(param.detach()), self.state[param].get(role_arrays.LOW)
        if low is None or y is self._trained.get(param):
            here.copy_(y)
        elif here.dtype == torch.bfloat16:
            store(split_of(local(low)), [here, local(low)], y)
        else:  # the weights have become wider: the low bits, of the old y, are in no part of this one
            here.copy_(y)
            local(low).zero_()

    def _z(self, param: Tensor, like: Tensor) -> Tensor:
        """In float32 at least."""
        z = role_arrays.value_of("z", self.state[param], self.states)
        assert z is not None
        return z.to(like.device, torch.promote_types(like.dtype, torch.float32))

    def _check_may_step(self) -> None:
        self._check_has_trained_weights()
        super()._check_may_step()

    def _check_has_trained_weights(self) -> None:
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError(
                "the optimizer is in eval mode: the parameters hold averages, which are not trained; call "
                "optimizer.train() first"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of all optimizers here. Also loads state dicts of the authors' ``AdamWScheduleFree``."""
        super().load_state_dict(state_dict)
        self._trained = {}

    def _of_others(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The authors count steps by group, and let the learning rate weigh the average."""
        if not any("k" in group for group in state_dict["param_groups"]):
            return state_dict
        groups = []
        counts: dict[Any, float] = {}
        for group in state_dict["param_groups"]:
            if group.get("r", 0) != 0 or group.get("weight_lr_power", 2) != 2:
                raise ValueError(
                    f"state_dict has r={group.get('r')} and weight_lr_power={group.get('weight_lr_power')}: here steps "
                    "count by the square of their warm-up, as with the authors' defaults, r=0 and weight_lr_power=2"
                )
            if "silent_sgd_phase" in group:
                raise ValueError(
                    "state_dict has silent_sgd_phase, as the authors' RAdamScheduleFree, which computes other steps "
                    "from states of the same names; load one of AdamWScheduleFree"
                )
            counts |= dict.fromkeys(group["params"], float(group["k"]))
            theirs = ("k", "r", "weight_sum", "lr_max", "scheduled_lr", "weight_lr_power")
            ours = {name: value for name, value in group.items() if name not in theirs}
            # their variant with closures has no modes: between steps the parameters hold averages
            groups.append({"train_mode": False, **ours})
        # states of no group are refused later
        states = {
            key: {"step": counts[key], **state} if key in counts else state
            for key, state in state_dict["state"].items()
        }
        return {**state_dict, "param_groups": groups, "state": states}
