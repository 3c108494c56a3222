"""AdamW and Adam: one rule, since they differ only in where weight decay enters."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedadam import checks
from fusedadam.contract.base import FusedOptimizer, Params
from fusedadam.contract.common_options import Common, Unpack, takes
from fusedadam.contract.declarations import DERIVED, OPTIONS, PEAK_LR, RELATIVE_TO_LR, State
from fusedadam.rules.clipping import maximized_and_clipped
from fusedadam.rules.ops import maximum, sqrt
from fusedadam.rules.restraint import agreement, surprise
from fusedadam.rules.rule import Flag, Scalar, Value, Values, rule


# fmt: off
def adam_scalars(
    step: Scalar, lr: Scalar, beta1: Scalar, beta2: Scalar, eps: Scalar, weight_decay: Scalar, max_grad_norm: Scalar
) -> dict[str, Any]:
    return scalars_of_powers(beta1**step, beta2**step, lr, beta1, beta2, eps, weight_decay, max_grad_norm)


def scalars_of_powers(
    power1: Scalar, power2: Scalar, lr: Scalar, beta1: Scalar, beta2: Scalar, eps: Scalar, weight_decay: Scalar,
    max_grad_norm: Scalar,
) -> dict[str, Any]:
    """``power1``, ``power2``: the betas to the power of the step; 0 for no bias correction."""
    return {
        "decay": 1 - lr * weight_decay, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm,
        "beta1c": 1 - beta1, "beta2": beta2, "beta2c": 1 - beta2, "eps": eps,
        "step_size": lr / (1 - power1), "debias2": 1 / sqrt(1 - power2),
    }


@rule(scalars=adam_scalars, reports=("grad_norm",), opening=maximized_and_clipped)
def adam(
    param: Value, grad: Value, exp_avg: Value, exp_avg_sq: Value, max_exp_avg_sq: Value, *,
    decay: Scalar, weight_decay: Scalar, beta1c: Scalar, beta2: Scalar, beta2c: Scalar, step_size: Scalar,
    debias2: Scalar, eps: Scalar, max_grad_norm: Scalar, numel: Scalar,
    amsgrad: Flag, maximize: Flag, decoupled: Flag, clipped: Flag, cautious: Flag, update_clipping: Flag,
) -> Values:
    if decoupled:
        decayed = param * decay
    else:
        decayed = param
        grad = grad + weight_decay * param
    exp_avg = exp_avg + beta1c * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + beta2c * grad * grad
    if amsgrad:
        max_exp_avg_sq = maximum(max_exp_avg_sq, exp_avg_sq)
    largest = max_exp_avg_sq if amsgrad else exp_avg_sq
    update = step_size * exp_avg / (sqrt(largest) * debias2 + eps)
    if cautious:
        update = update * agreement(exp_avg, grad, numel)
    if update_clipping:
        shorter = surprise(grad, largest * debias2 * debias2, eps, numel)
        param = param - (param - decayed + update) / shorter
    else:
        param = decayed - update
    return param, exp_avg, exp_avg_sq, max_exp_avg_sq
# fmt: on


ADAM_OPTIONS = OPTIONS | {
    "betas": checks.betas, "eps": checks.number, "amsgrad": checks.boolean, "decoupled_weight_decay": checks.boolean
}  # fmt: skip


class AdamW(FusedOptimizer):
    r"""AdamW, a drop-in for :class:`torch.optim.AdamW`.

    .. math::
        m_t = \beta_1 m_{t-1} + (1 - \beta_1) g_t, \quad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2, \quad
        p_t = (1 - \eta\lambda) p_{t-1} - \eta \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}

    Args:
        params: parameters, named parameters or groups, as for any torch optimizer
        lr: learning rate; a number, or a tensor of one element
        betas: decay of the two moments
        eps: added to the denominator
        weight_decay: decoupled weight decay
        amsgrad: divide by the largest second moment so far
        max_grad_norm: clips the update's gradients to this global norm, as :func:`torch.nn.utils.clip_grad_norm_` does,
            but leaves ``p.grad`` unchanged; ``optimizer.grad_norm`` is the norm before clipping. A group with None or 0
            is neither counted nor clipped; ``inf`` computes the norm without clipping
        peak_lr: the largest learning rate of the schedule. With it, weights are multiplied by
            :math:`1 - \lambda\eta_t / \eta_{\text{peak}}`: the decay follows the schedule, and does not depend on the
            size of the learning rate; None means :math:`1 - \lambda\eta_t`
        maximize: ascend the gradient instead of descending it
        cautious: mask out weights whose update opposes their gradient, and scale the others up to compensate
            (`arXiv 2411.16085 <https://arxiv.org/abs/2411.16085>`_)
        update_clipping: shorten a parameter's step and decay where its gradients exceed what the second moment
            predicts, as StableAdamW does (`arXiv 2304.13013 <https://arxiv.org/abs/2304.13013>`_)
        foreach, fused: accepted, as by torch, but without effect: every step is fused
        capturable: keep step counts and scalars on the device, so that a step can be captured in a CUDA graph (take one
            step before the capture); ``lr`` may then be a tensor on the device, and change between replays
        differentiable: not supported
        decoupled_weight_decay: False makes weight decay an L2 penalty, as Adam's; an option of groups in torch
        state_dtype: dtype of the moments; None means each parameter's own
        storage: the format of weights and states: ``"exact"``, ``"16bit"``, ``"8bit"``, a format for each role
            (``{"exp_avg_sq": "slice8"}``), or None for ``state_dtype``; the page Less memory (docs/less-memory.md) says
            what each saves and costs
        offload: keep the states in page-locked host memory, where the GPU's kernels use them in place, over the bus.
            The page Less memory says what that saves and costs; call ``optimizer.wait()`` before you read
            ``optimizer.state``
        seed: seed of the stochastic rounding that ``storage`` uses; saved in state dicts
        skip_nonfinite: skip a step, and do not count it, if any gradient is infinite or NaN. The device decides, for
            all processes together, at the cost of one more read of the gradients; ``optimizer.skipped_steps`` counts
            skipped steps
        backend: ``"numba"``, ``"triton"``, ``"eager"``, or None to choose by device

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = AdamW(model.parameters(), lr=1e-3)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    rule = adam
    takes_complex = True
    states = {
        "exp_avg": State(decay="beta1"),
        "exp_avg_sq": State(signed=False, decay="beta2"),
        "max_exp_avg_sq": State(signed=False, maximum_of="exp_avg_sq"),
    }
    options = ADAM_OPTIONS | PEAK_LR | {"cautious": checks.boolean, "update_clipping": checks.boolean}
    derived = DERIVED | RELATIVE_TO_LR | {"decoupled": lambda group: group.get("decoupled_weight_decay", True)}
    kept = (*FusedOptimizer.kept, "decoupled_weight_decay")

    @takes(Common)
    def __init__(
        self, params: Params, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, *, peak_lr: float | None = None, cautious: bool = False,
        update_clipping: bool = False, decoupled_weight_decay: bool = True, **common: Unpack[Common],
    ) -> None: ...  # fmt: skip  # ``takes`` passes everything on to the base class


class Adam(AdamW):
    r"""Adam, a drop-in for :class:`torch.optim.Adam`: as :class:`AdamW`, but weight decay is an L2 penalty.

    .. math::
        g_t \leftarrow g_t + \lambda p_{t-1}

    before the moments, and the parameter itself does not decay.

    Args:
        params, lr, betas, eps, amsgrad, max_grad_norm, maximize: as for :class:`AdamW`
        weight_decay: :math:`\lambda`, an L2 penalty that is added to the gradient after clipping, or decoupled
        foreach, fused, capturable, differentiable: as for :class:`AdamW`
        decoupled_weight_decay: weights decay by themselves, as AdamW's
        state_dtype, storage, offload, seed, skip_nonfinite, backend: as for :class:`AdamW`

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    options = ADAM_OPTIONS
    derived = DERIVED | {"decoupled": lambda group: group.get("decoupled_weight_decay", False)}
    fixed = {"cautious": False, "update_clipping": False}
    kept = FusedOptimizer.kept

    @takes(Common)
    def __init__(
        self, params: Params, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0, amsgrad: bool = False, *, decoupled_weight_decay: bool = False,
        **common: Unpack[Common],
    ) -> None: ...  # fmt: skip
