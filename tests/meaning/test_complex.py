"""Complex parameters, against torch.optim."""

from __future__ import annotations

import copy

import pytest
import torch

import fusedadam
from fusedadam.catalog import CATALOG
from tests.support import QUICK_PLACES

SHAPES = [(4, 6), (7,), (3, 2, 3), ()]
C64, C128 = torch.complex64, torch.complex128
TAKING = [entry.name for entry in CATALOG.values() if entry.cls.takes_complex and entry.torch_twin]
assert {"AdamW", "SGD"} < {*TAKING}
CASES = [(name, {"weight_decay": 0.1}) for name in TAKING]
CASES += [
    ("AdamW", {"amsgrad": True, "maximize": True}),
    ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
    ("SGD", {"momentum": 0.9, "dampening": 0.3, "maximize": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("RMSprop", {"weight_decay": 0.1, "momentum": 0.9, "centered": True}),
    ("RMSprop", {"maximize": True}),
    ("RAdam", {"weight_decay": 0.1, "betas": (0.9, 0.99)}),
    ("RAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
]


def numbers(shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=C128).to(dtype)


def leaves(dtype=C128, device="cpu"):
    """Complex parameters, with a real one among them."""
    made = [torch.nn.Parameter(numbers(shape, dtype, k).to(device)) for k, shape in enumerate(SHAPES)]
    return [made[0], torch.nn.Parameter(made[1].detach().real.clone()), *made[1:]]


def train(optimizer, steps=6, start=0):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in range(start, start + steps):
        for k, param in enumerate(params):
            grad = numbers(param.shape, torch.promote_types(param.dtype, C64), 100 * step + k)
            param.grad = (grad if param.is_complex() else grad.real.clone()).to(param.device)
        optimizer.step()
    return params


def assert_equal(ours, theirs, tolerance=1e-12):
    if CATALOG[type(ours).__name__].float32_twin:
        tolerance = max(tolerance, 1e-6)
    pairs = zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True)
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
        for name, value in theirs.state[other].items():
            if name != "step" and value is not None:
                kept = ours.state[mine][name]
                assert kept.dtype == value.dtype or name == "mu_product"
                torch.testing.assert_close(
                    kept, value, rtol=tolerance, atol=tolerance, check_device=False, check_dtype=False
                )


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_equals_torch_in_float64(name, options, foreach, place):
    device, backend = place
    ours = getattr(fusedadam, name)(leaves(device=device), lr=0.05, backend=backend, **options)
    theirs = getattr(torch.optim, name)(leaves(device=device), lr=0.05, foreach=foreach, **options)
    train(ours)
    train(theirs)
    assert_equal(ours, theirs)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_state_dicts_are_exchanged_with_torch_in_both_directions(name, options):
    ours = getattr(fusedadam, name)(leaves(), lr=0.05, **options)
    theirs = getattr(torch.optim, name)(leaves(), lr=0.05, **options)
    train(ours, 3)
    train(theirs, 3)
    saved = copy.deepcopy(ours.state_dict()), copy.deepcopy(theirs.state_dict())
    theirs.load_state_dict(saved[0])
    ours.load_state_dict(saved[1])
    train(ours, 3, start=3)
    train(theirs, 3, start=3)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("name", TAKING)
def test_float32_is_as_close_to_float64_as_torchs(name):
    def distance(library):
        narrow, wide = (getattr(library, name)(leaves(dtype), lr=0.05) for dtype in (C64, C128))
        pairs = zip(train(narrow), train(wide), strict=True)
        return max((a.detach() - b.detach()).abs().max().item() for a, b in pairs)

    assert distance(fusedadam) <= 1.5 * distance(torch.optim)


def test_a_norm_is_the_norm_of_complex_numbers():
    """Clipped by the norm of order 2 of all gradients together, as torch.nn.utils.clip_grad_norm_ has it."""
    ours = fusedadam.AdamW(leaves(), lr=0.05, max_grad_norm=1.0)
    theirs = torch.optim.AdamW(leaves(), lr=0.05)
    norms = []
    theirs.register_step_pre_hook(
        lambda optimizer, *_: norms.append(torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0))
    )
    train(ours)
    train(theirs)
    torch.testing.assert_close(ours.grad_norm, norms[-1].double(), rtol=1e-12, atol=0)
    assert_equal(ours, theirs, tolerance=1e-9)


@pytest.mark.parametrize("conjugated", [False, True])
def test_clip_grad_norm_equals_torchs(conjugated):
    ours, theirs = leaves(), leaves()
    for k, pair in enumerate(zip(ours, theirs, strict=True)):
        grad = numbers(pair[0].shape, C128, k)
        for param in pair:
            given = grad.clone().conj() if conjugated else grad.clone()
            param.grad = given if param.is_complex() else grad.real.clone()
    norm = fusedadam.clip_grad_norm_(ours, 0.5)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.5, foreach=False)  # which conjugates need
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad.is_conj() == other.grad.is_conj()
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=0)
    with pytest.raises(ValueError, match=r"norm_type=inf.*complex.*norm_type=2"):
        fusedadam.clip_grad_norm_(ours, 0.5, norm_type=float("inf"))
