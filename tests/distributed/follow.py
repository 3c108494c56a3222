"""Repeats the steps of one process on sharded parameters, and compares the results."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from tests.distributed.parts import divided_like, expected_here, here
from tests.distributed.reference import BIT_FOR_BIT, STEPS, Run, after, make
from tests.support import F32, F64, ulp

ULPS = 2  # of the parameter, or the update if that is larger, by which the rounding of sums may show in one step


def follow(
    run: Run,
    optimizer: str,
    params: list[Any],
    lay: Callable[[int, Tensor], Tensor] = lambda k, part: part,
    **options: Any,
) -> Any:
    """``params`` begin as the run did; ``lay`` puts the k-th one's gradients in memory. Returns the optimizer."""
    opt = make(optimizer, params, **options)
    for step in range(STEPS):
        for k, (param, grad) in enumerate(zip(params, run.grads[step], strict=True)):
            param.grad = None if grad is None else divided_like(grad, param, functools.partial(lay, k))
        opt.step()
        norm, projections = after(opt, params)
        assert projections == run.projections[step], f"step {step}"
        assert_same_norm(norm, run.norms[step], f"step {step}")
    assert_same(run, opt, params, bits=optimizer in BIT_FOR_BIT)
    return opt


def assert_same_norm(norm: float | None, expected: float | None, label: str = "") -> None:
    assert (norm is None) == (expected is None), label
    assert norm is None or expected is None or math.isclose(norm, expected, rel_tol=1e-6), label


def assert_same(run: Run, opt: Any, params: list[Any], bits: bool) -> None:
    """Each process looks at its own part. A norm over several dtypes is as exact as the coarsest of its terms."""
    compute = F64 if all(v.dtype == F64 for v in run.start) else F32
    for k, (param, value, states) in enumerate(zip(params, run.params, run.states, strict=True)):
        mine = opt.state.get(param, {})
        assert list(mine) == list(states), f"parameter {k}"
        if not states:
            assert torch.equal(here(param), expected_here(run.start[k], param)), f"parameter {k}"
            continue
        assert mine["step"] == states["step"], f"parameter {k}"
        assert_states_lie_like(param, mine)
        given = [own[k] for own in run.grads if own[k] is not None]
        assert_same_parts(param, mine, value, states, given, f"parameter {k}", compute, bits)


def assert_same_parts(
    param: Any, mine: dict[str, Any], value: Tensor, states: dict[str, Any], grads: list[Tensor], label: str,
    compute: torch.dtype = F32, bits: bool = False,
) -> None:  # fmt: skip
    """This process's parts of a parameter and its states are those of the whole ones, which saw these gradients."""
    largest = torch.stack([expected_here(g.double().abs(), param) for g in grads]).amax(0)
    for name, whole in {"param": value, **states}.items():
        if name == "step":
            continue
        kept = param if name == "param" else mine[name]
        result, expected, at = here(kept), expected_here(whole, kept), f"{name} of {label}, {tuple(param.shape)}"
        if bits:
            torch.testing.assert_close(result, expected, rtol=0, atol=0, msg=lambda m, at=at: f"{at}: {m}")
        else:
            size = size_of(name, expected, largest) if kept.shape == param.shape else expected.double().abs()
            assert_close(at, result, expected, size, compute)


def assert_states_lie_like(param: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        if name != "step":
            assert isinstance(value, DTensor) == isinstance(param, DTensor), name
            left_out = dimensions_left_out(name, param.dim())
            shape = [1 if k in left_out else size for k, size in enumerate(param.shape)]
            if name.endswith(
                ("_exponents", "_largest")
            ):  # one for a block of 32; a convolution's are of all dimensions but one
                shape = [*shape[:-1], shape[-1] // 32] if shape[-1] > 31 else [shape[0], math.prod(shape[1:]) // 32]
            assert list(value.shape) == ([] if name == "mu_product" else shape), name
            if isinstance(value, DTensor):
                assert value.device_mesh == param.device_mesh, name
                for placement, own in zip(param.placements, value.placements, strict=True):
                    assert own == (Replicate() if getattr(placement, "dim", None) in left_out else placement), name


def dimensions_left_out(state: str, dimensions: int) -> list[int]:
    every = list(range(dimensions))
    return {"row_var": every[-1:], "col_var": every[-2:-1], "mu_product": every}.get(state, [])


def size_of(name: str, expected: Tensor, grad: Tensor) -> Tensor:
    """What rounding is measured by: moments are rounded at the size of what goes into them, the gradients of this size
    at most; no update of Adam's is larger than a few lr."""
    sizes = {"exp_avg": grad, "exp_avg_sq": grad.square(), "max_exp_avg_sq": grad.square()}
    return torch.maximum(expected.double().abs(), sizes.get(name, torch.tensor(3e-2, dtype=F64)))


def assert_close(label: str, result: Tensor, expected: Tensor, size: Tensor, compute: torch.dtype) -> None:
    """Within the rounding of sums, carried on from step to step."""
    assert result.dtype == expected.dtype, label
    assert result.shape == expected.shape, label
    allowed = STEPS * ULPS * ulp(size, compute)
    if torch.finfo(result.dtype).eps > torch.finfo(compute).eps:
        allowed = allowed + ulp(size, result.dtype)  # the other side of a border
    off = (result.double() - expected.double()).abs() / allowed
    worst = off.max().item() if off.numel() else 0.0
    assert worst <= 1, f"{label}: {worst:.2f} times what is allowed"
