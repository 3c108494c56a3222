"""MindSpeed's optimizers: ours, under their names, with their arguments and defaults."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fusedadam import checks
from fusedadam.contract.base import FusedOptimizer, Params
from fusedadam.contract.declarations import Group
from fusedadam.optimizers import adamw
from fusedadam.optimizers.ema_adamw import EmaAdamW

__all__ = ["AdamW", "FusedEmaAdamW", "FusedTorchAdamW"]


class AdamW(adamw.AdamW):
    """MindSpeed's AdamW: :class:`fusedadam.AdamW` with MindSpeed's arguments.

    Args:
        adam_w_mode: accepted, and ignored, as by MindSpeed: weight decay is always decoupled

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, adam_w_mode: bool = False, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        checks.boolean("adam_w_mode", adam_w_mode)
        FusedOptimizer.__init__(
            self, params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize
        )  # fmt: skip


class FusedTorchAdamW(adamw.AdamW):
    """MindSpeed's name for torch's fused AdamW: :class:`fusedadam.AdamW`.

    Args:
        adam_w_mode: accepted, and ignored, as by MindSpeed: weight decay is always decoupled
        foreach, fused: accepted, but without effect: every step is fused

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = FusedTorchAdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self, params: Params, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, adam_w_mode: bool = False, *, maximize: bool = False,
        foreach: bool | None = None, capturable: bool = False, differentiable: bool = False, fused: bool | None = None,
    ) -> None:  # fmt: skip
        checks.boolean("adam_w_mode", adam_w_mode)
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=foreach, capturable=capturable,
            differentiable=differentiable, fused=fused,
        )  # fmt: skip


class FusedEmaAdamW(EmaAdamW):
    r"""MindSpeed's name for :class:`fusedadam.EmaAdamW`.

    Args:
        use_num_updates: begin with a shorter memory: in step n the decay is min(ema_decay, (1 + n) / (10 + n)), n being
            the parameter's own count, which is saved with it
        adam_w_mode: decoupled weight decay; False adds it to the gradient
        set_grad_none: whether ``zero_grad()`` sets the gradients to None or to zero
        amsgrad, maximize: not supported, as in MindSpeed

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = FusedEmaAdamW(model.parameters(), ema_decay=0.999)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.store(optimizer.param_groups)
        >>> optimizer.copy_to()  # evaluate the averaged model here
        >>> optimizer.restore(optimizer.param_groups)
    """

    options = EmaAdamW.options | {
        "use_num_updates": checks.boolean, "adam_w_mode": checks.boolean, "set_grad_none": checks.boolean,
        "amsgrad": functools.partial(checks.unsupported, error=RuntimeError),
        "maximize": functools.partial(checks.unsupported, error=RuntimeError),
    }  # fmt: skip
    derived = EmaAdamW.derived | {
        "ema_warmup": lambda group: group["use_num_updates"],
        "decoupled": lambda group: group["adam_w_mode"],
    }
    _stored: list[tuple[Tensor, Tensor]] | None = None

    def __init__(
        self, params: Params, lr: float = 1e-3, eps: float = 1e-8, betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 1e-2, ema_decay: float = 0.9999, amsgrad: bool = False, *, maximize: bool = False,
        use_num_updates: bool = True, bias_correction: bool = True, adam_w_mode: bool = True,
        set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        FusedOptimizer.__init__(
            self, params, lr=lr, eps=eps, betas=betas, weight_decay=weight_decay, ema_decay=ema_decay, amsgrad=amsgrad,
            maximize=maximize, use_num_updates=use_num_updates, bias_correction=bias_correction,
            adam_w_mode=adam_w_mode, set_grad_none=set_grad_none,
        )  # fmt: skip

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Sets the gradients to None or to zero, by default as ``set_grad_none`` says."""
        super().zero_grad(self.defaults["set_grad_none"] if set_to_none is None else set_to_none)

    @torch.no_grad()
    def copy_to(self) -> None:
        """Copies the averages into the parameters that have one."""
        self._before_reading()
        for param in self._params():
            if param in self.state and "ema_params" in self.state[param]:
                param.copy_(self.state[param]["ema_params"])

    def store(self, param_groups: list[Group]) -> None:
        """Keeps a copy of the parameters, on the host, until :meth:`restore`."""
        self._stored = [(p, p.detach().to("cpu", copy=True)) for group in param_groups for p in group["params"]]

    @torch.no_grad()
    def restore(self, param_groups: list[Group]) -> None:
        """Copies the stored values back into the parameters."""
        if self._stored is None:
            raise RuntimeError("restore() has nothing to restore; call store(param_groups) first")
        if [id(p) for p, _ in self._stored] != [id(p) for group in param_groups for p in group["params"]]:
            raise ValueError("param_groups has other parameters than store() was given; pass the same groups")
        for param, before in self._stored:
            param.copy_(before)
        self._stored = None
