"""Complex parameters are lowered as real ones with a last dimension of 2: the same bits, on every backend."""

from __future__ import annotations

import pytest
import torch

import fusedadam
from tests.meaning.test_complex import CASES, numbers
from tests.support import PLACES

DTYPES = [
    torch.complex64,
    pytest.param(torch.complex128, marks=pytest.mark.exhaustive),
    pytest.param(torch.complex32, marks=[pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore")]),
]
LAYOUTS = {
    "contiguous": lambda z: z.clone(),
    "transposed": lambda z: z.t().contiguous().t(),
    "with gaps": lambda z: torch.stack([z, z], 2)[:, :, 0],
    "one of two rows": lambda z: torch.stack([z, z], 1)[:, 1],
    "lazily conjugated": lambda z: z.conj().resolve_conj().conj(),
    "lazily negated": lambda z: torch._neg_view(-z),
    "both": lambda z: torch._neg_view(-z.conj().resolve_conj()).conj(),
}


def states_of(optimizer, param):
    return [value for name, value in sorted(optimizer.state[param].items()) if name != "step"]


def train(optimizer, lay, as_real, steps=3):
    param = optimizer.param_groups[0]["params"][0]
    for step in range(steps):
        dtype = param.dtype.to_complex() if as_real else param.dtype
        grad = numbers((5, 300), torch.complex64, step).to(param.device, dtype)
        param.grad = torch.view_as_real(grad) if as_real else lay(grad)
        optimizer.step()
    tensors = [param.detach(), *states_of(optimizer, param)]
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]


def bits(tensor):
    return tensor.contiguous().cpu().numpy().tobytes()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_the_bits_of_real_parameters(name, options, dtype, place):
    device, backend = place
    start = numbers((5, 300), torch.complex64, 77).to(device, dtype)
    make = getattr(fusedadam, name)
    whole = make([torch.nn.Parameter(start.clone())], lr=0.05, backend=backend, max_grad_norm=3.0, **options)
    split = make([torch.nn.Parameter(torch.view_as_real(start).clone())], lr=0.05, max_grad_norm=3.0, **options)
    found = zip(train(whole, LAYOUTS["contiguous"], False), train(split, None, True), strict=True)
    assert all(bits(a) == bits(b) for a, b in found)
    assert float(whole.grad_norm) == float(split.grad_norm)


@pytest.mark.parametrize("backend", ["numba", "eager"])
@pytest.mark.parametrize("of_param", ["contiguous", "transposed", "with gaps"])
@pytest.mark.parametrize("of_grad", [*LAYOUTS])
def test_every_layout_gives_the_same_bits(of_grad, of_param, backend):
    start = numbers((5, 300), torch.complex64, 77)
    param = torch.nn.Parameter(LAYOUTS[of_param](start))
    optimizer = fusedadam.AdamW([param], lr=0.05, backend=backend, amsgrad=True)
    expected = fusedadam.AdamW([torch.nn.Parameter(torch.view_as_real(start).clone())], lr=0.05, amsgrad=True)
    found = zip(train(optimizer, LAYOUTS[of_grad], False), train(expected, None, True), strict=True)
    assert all(bits(a) == bits(b) for a, b in found)
