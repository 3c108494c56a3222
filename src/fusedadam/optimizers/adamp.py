"""AdamP: Adam whose steps do not let scale-invariant weights grow (https://arxiv.org/abs/2006.08217)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedadam import checks
from fusedadam.contract.base import FusedOptimizer, Params
from fusedadam.contract.common_options import Common, Unpack, takes
from fusedadam.contract.declarations import DERIVED, OPTIONS, PEAK_LR, RELATIVE_TO_LR, State
from fusedadam.rules.clipping import maximized_and_clipped
from fusedadam.rules.ops import abs, maximum, row_sum, sqrt, tensor_sum, where  # noqa: A004
from fusedadam.rules.rule import Flag, Scalar, Value, Values, rule

PROJECTIONS = ("none", "layer", "channel")


# fmt: off
def adamp_scalars(
    step: Scalar, lr: Scalar, beta1: Scalar, beta2: Scalar, eps: Scalar, weight_decay: Scalar,
    delta: Scalar, wd_ratio: Scalar, max_grad_norm: Scalar,
) -> dict[str, Any]:
    return {
        "beta1": beta1, "beta1c": 1 - beta1, "beta2": beta2, "beta2c": 1 - beta2, "eps": eps, "delta": delta,
        "step_size": lr / (1 - beta1**step), "debias2": 1 / sqrt(1 - beta2**step), "max_grad_norm": max_grad_norm,
        "decay": 1 - lr * weight_decay, "projected_decay": 1 - lr * weight_decay * wd_ratio,
    }


def cosine(pg: Value, pp: Value, gg: Value, eps: Scalar) -> Value:
    return abs(pg) / (maximum(sqrt(pp), eps) * maximum(sqrt(gg), eps))


def along(pu: Value, pp: Value, eps: Scalar) -> Value:
    """How much of p there is in u: u - along * p is u without its radial part."""
    norm = sqrt(pp) + eps
    return pu / (norm * norm)


@rule(scalars=adamp_scalars, reports=("grad_norm", "projection"), opening=maximized_and_clipped)
def adamp(
    param: Value, grad: Value, exp_avg: Value, exp_avg_sq: Value, *,
    beta1: Scalar, beta1c: Scalar, beta2: Scalar, beta2c: Scalar, eps: Scalar, delta: Scalar, step_size: Scalar,
    debias2: Scalar, max_grad_norm: Scalar, decay: Scalar, projected_decay: Scalar, row_length: Scalar, numel: Scalar,
    nesterov: Flag, maximize: Flag, clipped: Flag, matrix: Flag,
) -> Values:
    exp_avg = exp_avg + beta1c * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + beta2c * grad * grad
    momentum = beta1 * exp_avg + beta1c * grad if nesterov else exp_avg
    update = momentum / (sqrt(exp_avg_sq) * debias2 + eps)
    if matrix:  # p: param, g: grad, u: update
        pp, gg, pg, pu = row_sum(param * param), row_sum(grad * grad), row_sum(param * grad), row_sum(param * update)
        too_radial = tensor_sum(where(cosine(pg, pp, gg, eps) < delta / sqrt(row_length), 0.0, 1.0))
        channel = too_radial == 0
        layer = cosine(tensor_sum(pg), tensor_sum(pp), tensor_sum(gg), eps) < delta / sqrt(numel)
        projection = where(channel, 2.0, where(layer, 1.0, 0.0))
        radial = where(channel, along(pu, pp, eps), where(layer, along(tensor_sum(pu), tensor_sum(pp), eps), 0.0))
        update = update - radial * param
        param = param * where(projection > 0, projected_decay, decay)
    else:
        param = param * decay
    param = param - step_size * update
    return param, exp_avg, exp_avg_sq
# fmt: on


class AdamP(FusedOptimizer):
    r"""AdamP (`arXiv 2006.08217 <https://arxiv.org/abs/2006.08217>`_), in the names and defaults of its authors'
    package.

    Normalisation makes many weights scale-invariant: only their direction matters. The radial part of a step then only
    makes them grow, which shrinks all later steps. AdamP removes it. With :math:`u` the step of Adam,

    .. math::
        u \leftarrow u - \hat p \, (\hat p \cdot u), \quad \hat p = \frac{p}{\lVert p \rVert + \epsilon}
        \quad \text{where} \quad
        \cos(p, g) = \frac{|p \cdot g|}{\lVert p \rVert \lVert g \rVert} < \frac{\delta}{\sqrt{n}}

    first by channel (each slice ``p[i]`` by itself, if all of them pass the test, :math:`n` being the elements of a
    slice), else by layer (the whole parameter), else not at all. Parameters of fewer than two dimensions are never
    projected. Where a parameter was projected, weight decay is multiplied by ``wd_ratio``.

    Args:
        params, lr, betas, eps: as for :class:`AdamW`
        weight_decay: decoupled weight decay
        delta: the threshold :math:`\delta`
        wd_ratio: weight decay of projected parameters, relative to the others
        nesterov: Nesterov's momentum
        max_grad_norm, peak_lr, maximize, foreach, capturable, differentiable, fused: as for :class:`AdamW`
        state_dtype, storage, offload, seed, skip_nonfinite, backend: as for :class:`AdamW`

    Example:
        >>> model = torch.nn.Linear(2, 3)
        >>> optimizer = AdamP(model.parameters(), lr=1e-3, weight_decay=1e-2)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.projections()[model.bias]
        'none'
    """

    rule = adamp
    states = {"exp_avg": State(decay="beta1"), "exp_avg_sq": State(signed=False, decay="beta2")}
    options = OPTIONS | PEAK_LR | {
        "betas": checks.betas, "eps": checks.number, "delta": checks.number, "wd_ratio": checks.number,
        "nesterov": checks.boolean,
    }  # fmt: skip
    derived = DERIVED | RELATIVE_TO_LR

    @takes(Common)
    def __init__(
        self, params: Params, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0, delta: float = 0.1, wd_ratio: float = 0.1, nesterov: bool = False, *,
        peak_lr: float | None = None, **common: Unpack[Common],
    ) -> None: ...  # fmt: skip

    def projections(self) -> dict[Tensor | str, str]:
        """What the last step did to each parameter that has taken one: ``"channel"``, ``"layer"`` or ``"none"``.

        The keys are the parameters, or their names if the optimizer was made of ``model.named_parameters()``. Waits for
        the device.
        """
        chosen, params = self._report("projection"), self._params()
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        keys: Sequence[Tensor | str] = names if len(names) == len(params) else params
        return {
            key: PROJECTIONS[int(chosen.get(k, 0.0)) if p.numel() else 0]
            for k, (key, p) in enumerate(zip(keys, params, strict=True))
            if p in self.state or k in chosen  # it may have taken a step on other processes alone
        }
