"""AdamW (or Adam) that keeps an exponential moving average of the parameters, in the same pass over memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fusedadam import checks
from fusedadam.contract import role_arrays, weights, wrappers
from fusedadam.contract.base import FusedOptimizer, Params
from fusedadam.contract.common_options import OursAndTorchs, Unpack, takes
from fusedadam.contract.declarations import DERIVED, OPTIONS, PEAK_LR, RELATIVE_TO_LR, State
from fusedadam.rules.clipping import clipped_by_norm
from fusedadam.rules.ops import minimum, sqrt, where
from fusedadam.rules.rule import Flag, Scalar, Value, Values, rule
from fusedadam.tensors.shards import with_local


# fmt: off
def ema_adam_scalars(
    step: Scalar, lr: Scalar, beta1: Scalar, beta2: Scalar, eps: Scalar, weight_decay: Scalar,
    ema_decay: Scalar, ema_warmup: Scalar, bias_correction: Scalar, max_grad_norm: Scalar,
) -> dict[str, Any]:
    keep = where(ema_warmup > 0, minimum(ema_decay, (1 + step) / (10 + step)), ema_decay)
    return {
        "lr": lr, "eps": eps, "weight_decay": weight_decay,
        "beta1": beta1, "beta1c": 1 - beta1, "debias1": where(bias_correction > 0, 1 / (1 - beta1**step), 1.0),
        "beta2": beta2, "beta2c": 1 - beta2, "debias2": where(bias_correction > 0, 1 / (1 - beta2**step), 1.0),
        "keep": keep, "keepc": 1 - keep, "max_grad_norm": max_grad_norm,
    }


@rule(scalars=ema_adam_scalars, reports=("grad_norm",))
def ema_adam(
    param: Value, grad: Value, exp_avg: Value, exp_avg_sq: Value, ema_params: Value, *,
    lr: Scalar, eps: Scalar, weight_decay: Scalar, beta1: Scalar, beta1c: Scalar, debias1: Scalar,
    beta2: Scalar, beta2c: Scalar, debias2: Scalar, keep: Scalar, keepc: Scalar, max_grad_norm: Scalar,
    decoupled: Flag, clipped: Flag,
) -> Values:
    if clipped:
        grad, grad_norm = clipped_by_norm(grad, max_grad_norm)
    if not decoupled:
        grad = grad + weight_decay * param
    exp_avg = beta1 * exp_avg + beta1c * grad
    exp_avg_sq = beta2 * exp_avg_sq + beta2c * grad * grad
    update = exp_avg * debias1 / (sqrt(exp_avg_sq * debias2) + eps)
    if decoupled:
        update = update + weight_decay * param
    param = param - lr * update
    ema_params = keep * ema_params + keepc * param
    return param, exp_avg, exp_avg_sq, ema_params
# fmt: on


class EmaAdamW(FusedOptimizer):
    r"""AdamW with an exponential moving average of the parameters, kept in the state as ``ema_params``.

    .. math::
        p_t = p_{t-1} - \eta \left( \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}
        + \lambda p_{t-1} \right), \quad s_t = d_t s_{t-1} + (1 - d_t) p_t

    Args:
        params, lr, betas, eps, weight_decay: as for :class:`AdamW`
        ema_decay: the decay :math:`d` of the average, in [0, 1]
        ema_warmup: begin with a shorter memory, :math:`d_t = \min(d, (1 + t) / (10 + t))`
        decoupled: weight decay as above (AdamW); False adds it to the gradient (Adam)
        bias_correction: divide the moments by :math:`1 - \beta^t`
        ema_dtype: dtype of the average; None means each parameter's own. In bfloat16 an average soon stops changing:
            pass ``torch.float32`` for low-precision parameters, or use ``storage``
        max_grad_norm, peak_lr, foreach, capturable, differentiable, fused: as for :class:`AdamW`
        state_dtype, storage, offload, seed, skip_nonfinite, backend: as for :class:`AdamW`

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = EmaAdamW(model.parameters(), lr=1e-3, ema_decay=0.999)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
        >>> with optimizer.ema_weights():
        ...     averaged = model(torch.ones(4, 2))
    """

    rule = ema_adam
    states = {
        "exp_avg": State(decay="beta1"),
        "exp_avg_sq": State(signed=False, decay="beta2"),
        "ema_params": State(initial="param", dtype_option="ema_dtype", decay="ema_decay"),
    }
    options = OPTIONS | PEAK_LR | {
        "betas": checks.betas, "eps": checks.number, "ema_decay": checks.fraction, "ema_warmup": checks.boolean,
        "decoupled": checks.boolean, "bias_correction": checks.boolean, "ema_dtype": checks.storage_dtype,
        "amsgrad": checks.unsupported, "maximize": checks.unsupported,
    }  # fmt: skip
    derived = DERIVED | RELATIVE_TO_LR

    @takes(OursAndTorchs)
    def __init__(
        self, params: Params, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, ema_decay: float = 0.9999, *, ema_warmup: bool = True, decoupled: bool = True,
        bias_correction: bool = True, ema_dtype: torch.dtype | str | None = None, max_grad_norm: float | None = None,
        peak_lr: float | None = None, **common: Unpack[OursAndTorchs],
    ) -> None: ...  # fmt: skip

    _has_averages = False  # the model, inside ema_weights()

    @contextlib.contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Puts the averages into the model, and the trained weights back at the end, also after an error.

            with optimizer.ema_weights():
                evaluate(model)

        Refuses steps inside, which would be lost when the trained weights come back.
        """
        wrappers.check_has_all_averages(self)
        self._before_reading()
        averaged = [(param, self._average(param)) for param, state in self._states_of_params() if "ema_params" in state]
        sharded = wrappers.fsdp_modules([param for param, _ in averaged])
        trained = [param.detach().clone() for param, _ in averaged]  # all of them before any is overwritten
        outer, is_back = self._has_averages, False

        def put_back() -> None:
            nonlocal is_back
            if not is_back:
                with torch.no_grad():
                    for (param, _), before in zip(averaged, trained, strict=True):
                        param.copy_(before)
                wrappers.drop_gathered(sharded)
                is_back = True

        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self, "_has_averages", outer)
            stack.callback(put_back)
            stack.callback(put_back)  # again, if Ctrl-C has interrupted the first
            self._has_averages = True
            with torch.no_grad():
                for param, ema in averaged:
                    param.copy_(ema)
            wrappers.drop_gathered(sharded)
            yield

    def ema_state_dict(self, model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """A copy of the model's state dict with the EMA in place of the trained weights, to save for inference.
        ``dtype``: of the averages; None means each parameter's own.

        Entries are recognized by their memory, under any name. Raises if a parameter of the model has an average, but
        no entry.
        """
        wrappers.check_has_all_averages(self)
        self._before_reading()

        def average_of(param: Tensor) -> Tensor | None:
            if "ema_params" not in self.state.get(param, {}):
                return None
            return self._average(param, dtype).to(dtype or param.dtype, copy=True)

        return weights.replaced(
            self, model, average_of, "averages", "use ema_weights(), and take the state dict inside"
        )

    def _check_may_step(self) -> None:
        if self._has_averages:
            raise RuntimeError("a step inside ema_weights() would be lost when the trained weights come back")
        super()._check_may_step()

    def _check_has_trained_weights(self) -> None:
        if self._has_averages:
            raise RuntimeError(
                "inside ema_weights() the model has averages, which the low bits of the trained weights do not belong "
                "to; call this outside, or use ema_state_dict(model, dtype=torch.float32)"
            )

    def _average(self, param: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The average of a parameter; without its low bits if they have no room in the dtype."""
        state = self.state[param]
        average: Tensor = state["ema_params"]
        if average.dtype == (dtype or param.dtype) or "ema_params_low" not in state:
            return average
        whole = role_arrays.value_of("ema_params", state, self.states)
        assert whole is not None
        return with_local(param.detach(), whole)
