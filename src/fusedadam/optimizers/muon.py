"""Muon: orthogonalized momentum for matrices, and AdamW for the rest (https://kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedadam import checks
from fusedadam.contract.base import FusedOptimizer, Params, restored_on_error
from fusedadam.contract.common_options import Common, Unpack, takes
from fusedadam.contract.declarations import DERIVED, OPTIONS, Group, State
from fusedadam.optimizers.adamw import scalars_of_powers
from fusedadam.rules.clipping import maximized_and_clipped
from fusedadam.rules.newton_schulz import KELLER, NAMED, NewtonSchulz, coefficients_of
from fusedadam.rules.ops import maximum, orthogonalized, sqrt
from fusedadam.rules.rule import Flag, Scalar, Value, Values, rule

ADJUSTMENTS = ("original", "match_rms_adamw")
LARGEST_STEPS = 99  # as in torch
# The defaults of https://github.com/KellerJordan/Muon, for groups that say use_muon, as its own do
OF_KELLER: dict[bool, Group] = {
    True: {"lr": 0.02, "weight_decay": 0.0},
    False: {"lr": 3e-4, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-10},
}
BETAS = (0.9, 0.95)  # for AdamW
LR, WEIGHT_DECAY = 1e-3, 0.1  # torch's defaults; these very objects mean that nobody has given any


# fmt: off
def muon_scalars(
    step: Scalar, lr: Scalar, momentum: Scalar, weight_decay: Scalar, beta1: Scalar, beta2: Scalar, eps: Scalar,
    max_grad_norm: Scalar,
) -> dict[str, Any]:
    of_adamw = scalars_of_powers(beta1**step, beta2**step, lr, beta1, beta2, eps, weight_decay, max_grad_norm)
    return {**of_adamw, "lr": lr, "momentum": momentum, "momentumc": 1 - momentum}


@rule(scalars=muon_scalars, reports=("grad_norm",), opening=maximized_and_clipped)
def muon(
    param: Value, grad: Value, momentum_buffer: Value, exp_avg: Value, exp_avg_sq: Value, *,
    lr: Scalar, decay: Scalar, momentum: Scalar, momentumc: Scalar, matrix_rows: Scalar, matrix_columns: Scalar,
    beta1c: Scalar, beta2: Scalar, beta2c: Scalar, step_size: Scalar, debias2: Scalar, eps: Scalar,
    max_grad_norm: Scalar,
    use_muon: Flag, nesterov: Flag, match_rms: Flag, maximize: Flag, clipped: Flag, matrix: Flag,
) -> Values:
    if use_muon and matrix:
        momentum_buffer = momentum_buffer + momentumc * (grad - momentum_buffer)
        update = grad + momentum * (momentum_buffer - grad) if nesterov else momentum_buffer
        if match_rms:
            scale = 0.2 * sqrt(maximum(matrix_rows, matrix_columns))
        else:
            scale = sqrt(maximum(1.0, matrix_rows / matrix_columns))
        param = param * decay - lr * scale * orthogonalized(update)
    else:
        exp_avg = exp_avg + beta1c * (grad - exp_avg)
        exp_avg_sq = beta2 * exp_avg_sq + beta2c * grad * grad
        param = param * decay - step_size * exp_avg / (sqrt(exp_avg_sq) * debias2 + eps)
    return param, momentum_buffer, exp_avg, exp_avg_sq
# fmt: on


def _coefficients(name: str, value: Any) -> None:
    if isinstance(value, str):
        checks.one_of(name, value, NAMED)
    elif not isinstance(value, (tuple, list)) or len(value) != 3:
        raise ValueError(
            f"{name}={value!r} are not three numbers; it must be a tuple (a, b, c), or one of "
            f"{', '.join(map(repr, NAMED))}"
        )
    else:
        for number in value:
            checks.finite(name, number)


def _steps(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST_STEPS:
        raise ValueError(f"{name}={value!r} must be an int from 0 to {LARGEST_STEPS}")


def _adjustment(name: str, value: Any) -> None:
    if value is not None:
        checks.one_of(name, value, ADJUSTMENTS)


def _refuse_vectors(group: Group, param: Tensor) -> None:
    if group["use_muon"] and param.dim() < 2:
        raise ValueError(
            f"a parameter has shape {tuple(param.shape)}, and Muon takes matrices; put it into a group with "
            "use_muon=False, as fusedadam.param_groups(model, optimizer='muon') does, or write use_muon=None, and "
            "AdamW takes it"
        )


class Muon(FusedOptimizer):
    r"""Muon, a drop-in for :class:`torch.optim.Muon`, with AdamW for other parameters in the same object.

    .. math::
        b_t = \mu b_{t-1} + (1 - \mu) g_t, \quad u_t = \mu b_t + (1 - \mu) g_t, \quad
        p_t = (1 - \eta\lambda) p_{t-1} - \eta \, s \, \operatorname{orthogonalized}(u_t)

    where :math:`u_t = b_t` without ``nesterov``. Orthogonalized means: the singular vectors stay, and the singular
    values become nearly 1, by ``ns_steps`` iterations :math:`X \leftarrow a X + b (X X^\top) X + c (X X^\top)^2 X` of
    :math:`X = u / \max(\lVert u \rVert, \epsilon)`. The scale :math:`s` is :math:`\sqrt{\max(1, m / n)}` for
    a matrix of :math:`m` rows and :math:`n` columns.

    Three dimensions are a stack of matrices, as the experts of a mixture. Of four or more, each index of the first is a
    row, as for a convolution.

    Args:
        params: as for :class:`AdamW`; :func:`fusedadam.param_groups` with ``optimizer="muon"`` chooses which of them
            are for Muon
        lr: learning rate; a number, or a tensor of one element
        weight_decay: decoupled weight decay
        momentum: how much of the buffer is kept, :math:`\mu`
        nesterov: Nesterov's momentum
        ns_coefficients: the coefficients :math:`(a, b, c)` of all iterations, or the name of a set with others for each
            iteration: ``"you"``, ``"polar-express"``; ``"keller"`` is the default
        eps: lower limit of the norm that a matrix is divided by; in groups for AdamW, added to the denominator
        ns_steps: how many iterations
        adjust_lr_fn: ``"original"``, which None also means, or ``"match_rms_adamw"``, for :math:`s = 0.2
            \sqrt{\max(m, n)}`: with it, learning rates and weight decay of AdamW serve Muon too
        use_muon: True for Muon, which takes matrices alone; False for AdamW; None for Muon where a parameter has two
            dimensions or more. The value in a group takes precedence. A group that sets it has the defaults of Keller
            Jordan's package, unless it sets its own: with True ``lr=0.02, weight_decay=0``, unless these arguments are
            given; with False ``lr=3e-4, weight_decay=0, betas=(0.9, 0.95), eps=1e-10``, whatever the arguments say
        betas: decay of the two moments, in groups for AdamW
        max_grad_norm, maximize, foreach, capturable, differentiable, fused: as for :class:`AdamW`
        state_dtype, storage, offload, seed, skip_nonfinite, backend: as for :class:`AdamW`

    Example:
        >>> model = torch.nn.Linear(2, 3)
        >>> optimizer = Muon([
        ...     {"params": [model.weight], "use_muon": True, "lr": 0.02},
        ...     {"params": [model.bias], "use_muon": False, "lr": 3e-4},
        ... ])
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    rule = muon
    states = {
        "momentum_buffer": State(decay="momentum"),
        "exp_avg": State(decay="beta1"),
        "exp_avg_sq": State(signed=False, decay="beta2"),
    }
    options = OPTIONS | {
        "momentum": checks.number, "nesterov": checks.boolean, "ns_coefficients": _coefficients, "eps": checks.number,
        "ns_steps": _steps, "adjust_lr_fn": _adjustment, "use_muon": functools.partial(checks.boolean, or_none=True),
        "betas": checks.betas,
    }  # fmt: skip
    derived = DERIVED | {
        "match_rms": lambda group: group["adjust_lr_fn"] == "match_rms_adamw",
        "use_muon": lambda group: group["use_muon"] is not False,
    }
    _check_param = staticmethod(_refuse_vectors)
    step_if_uncounted = 1.0  # torch's has no count, and matrices do not depend on it
    _given: frozenset[str] | None = None  # which arguments a user has given, of those that groups may replace

    @takes(Common)
    def __init__(
        self, params: Params, lr: float | Tensor = LR, weight_decay: float = WEIGHT_DECAY, momentum: float = 0.95,
        nesterov: bool = True, ns_coefficients: str | Sequence[float] = KELLER, eps: float = 1e-7, ns_steps: int = 5,
        adjust_lr_fn: str | None = None, *, use_muon: bool | None = True, betas: tuple[float, float] = BETAS,
        **common: Unpack[Common],
    ) -> None: ...  # fmt: skip

    @classmethod
    def newton_schulz(cls, group: Group) -> NewtonSchulz:
        steps = coefficients_of(group["ns_coefficients"], int(group["ns_steps"]))
        return NewtonSchulz(steps, group["eps"])

    def add_param_group(self, param_group: Group) -> None:
        """As in torch.optim; a group that says ``use_muon`` has the defaults of its branch."""
        use_muon = param_group.get("use_muon") if isinstance(param_group, dict) else None
        if self._given is None:  # the first group; copies have other objects
            defaults = {"lr": LR, "weight_decay": WEIGHT_DECAY}
            self._given = frozenset(name for name, value in defaults.items() if self.defaults[name] is not value)
        with restored_on_error([param_group] if isinstance(param_group, dict) else []):
            if isinstance(use_muon, bool):
                for name, value in OF_KELLER[use_muon].items():
                    if not (use_muon and name in self._given):
                        param_group.setdefault(name, value)  # no copy: as in torch, the group is the caller's dict
            super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_given": self._given}
