"""Gradients: assigned in any layout, views, computed by autograd, changed in place, shared, or missing."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition
from torch import Tensor

import fusedadam
from tests.fuzz.judge import Expected, compare
from tests.fuzz.program import Program, a_param, event
from tests.fuzz.tensors import DTYPES, GRADIENT_LAYOUTS, VIEWS, gradient, is_expanded, plain
from tests.meaning.by_hand import clipped, norm_by_hand

CLIPPED_DTYPES = (torch.float32, torch.bfloat16)


class Gradients(Program):
    @event(param=a_param, layout=st.sampled_from(GRADIENT_LAYOUTS), view=st.sampled_from(VIEWS))
    def set_gradient(self, param: int, layout: str, view: str) -> None:
        self.set_grad(param, gradient(self.new_values(param), self.params[param], layout, view))

    @precondition(
        lambda self: hasattr(torch.Tensor, "grad_dtype") and any(not self.is_compiled(k) for k in range(len(self.kept)))
    )
    @event(dtype=st.sampled_from(sorted(DTYPES)))
    def set_gradients_of_another_dtype(self, dtype: str) -> None:
        """torch allows this where ``grad_dtype`` is None, which torch 2.8 does not have and 2.11 has."""
        for k, param in enumerate(self.params):
            if not self.is_compiled(k):
                param.grad = None
                param.grad_dtype = None
                self.set_grad(k, self.new_values(k, DTYPES[dtype]))

    @event(param=a_param)
    def drop_gradient(self, param: int) -> None:
        self.set_grad(param, None)

    @event(param=a_param)
    def free_gradient_and_set_another(self, param: int) -> None:
        """The new one often gets the same memory."""
        self.set_grad(param, None)
        self.set_grad(param, self.new_values(param))

    @event(param=a_param)
    def share_a_gradient(self, param: int) -> None:
        """With all parameters of the same shape and dtype: without a GradScaler, gradients are only read."""
        grad = self.new_values(param)
        for k, kept in enumerate(self.kept):
            if kept.value.shape == grad.shape and kept.value.dtype == grad.dtype:
                self.set_grad(k, grad)

    @event(param=a_param)
    def add_to_gradient_in_place(self, param: int) -> None:
        grad = self.params[param].grad
        if grad is not None and not is_expanded(grad):
            grad.add_(self.new_values(param, grad.dtype))
            self.read_gradients()

    @event(param=a_param)
    def transpose_gradient_in_place(self, param: int) -> None:
        """The same tensor at the same address, with other strides."""
        grad = self.params[param].grad
        if grad is not None and grad.dim() == 2 and grad.shape[0] == grad.shape[1]:
            grad.t_()
            self.read_gradients()

    @event(set_to_none=st.booleans())
    def zero_grad(self, set_to_none: bool) -> None:
        self._drop_expanded_gradients()
        self.optimizer.zero_grad(set_to_none)
        for kept in self.kept:
            kept.grad = None if set_to_none or kept.grad is None else torch.zeros_like(kept.grad)

    @event(kind=st.sampled_from(["product", "sum", "complex"]))
    def backward(self, kind: str) -> None:
        """Autograd adds to the present gradients, and chooses the layout of new ones."""
        self._drop_expanded_gradients()
        losses = [self._loss(k, p, kind) for k, p in enumerate(self.params) if p.requires_grad]
        for loss in losses:
            loss.backward()
        self.read_gradients()

    def _loss(self, k: int, param: Tensor, kind: str) -> Tensor:
        weight = self.new_values(k)
        if kind == "sum":
            return param.sum()
        if kind == "complex" and param.dtype in (torch.float32, torch.float64):
            return (torch.complex(weight, param).conj() * torch.complex(weight, -weight)).imag.sum()
        return (param * weight).sum()

    @event(max_norm=st.sampled_from([0.3, 1e6]), norm_type=st.sampled_from([2.0, torch.inf]))
    def clip_gradients(self, max_norm: float, norm_type: float) -> None:
        """Only in two dtypes: this function always uses Numba, which compiles kernels for each."""
        self._drop_expanded_gradients()
        self._give_shared_gradients_memory_of_their_own()
        chosen = [k for k, p in enumerate(self.params) if p.grad is not None and p.grad.dtype in CLIPPED_DTYPES]
        before = [plain(self.params[k].grad).double() for k in chosen]
        fusedadam.clip_grad_norm_([self.params[k] for k in chosen], max_norm, norm_type)
        largest = max((float(g.abs().max()) for g in before if g.numel()), default=0.0)
        exact = clipped(before, max_norm, norm_by_hand(before) if norm_type == 2 else largest)
        for k, old, new in zip(chosen, before, exact, strict=True):
            got = self.params[k].grad
            compare(plain(got), Expected(new, old, torch.float32), f"clipped gradient {k}")
        self.read_gradients()

    def _drop_expanded_gradients(self) -> None:
        """torch cannot write to them either."""
        for k, param in enumerate(self.params):
            if param.grad is not None and is_expanded(param.grad):
                self.set_grad(k, None)

    def _give_shared_gradients_memory_of_their_own(self) -> None:
        for k, param in enumerate(self.params):
            if param.grad is not None:
                self.set_grad(k, param.grad.clone())
