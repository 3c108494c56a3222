"""Storage formats on every backend, against the eager one on a CPU: bit for bit, all arrays."""

from __future__ import annotations

import functools

import pytest
import torch

from fusedadam import AdamW, RMSpropTF
from fusedadam.catalog import CATALOG
from tests.support import BF16, F16, F32, PLACES, threads

# blocks in one row and several, a row that is no multiple of a tile, three dimensions, what is not eligible
SHAPES = [(65, 64), (2, 33, 96), (4, 1056), (50,), (33, 40)]
RULES = {entry.name: entry.tested[entry.name] for entry in CATALOG.values()}
RULES |= {
    "AMSGrad": functools.partial(AdamW, amsgrad=True),
    "clipped": functools.partial(AdamW, max_grad_norm=1.0),
    "centered": functools.partial(RMSpropTF, momentum=0.9, centered=True),
}
MULTIPLYING = [entry.name for entry in CATALOG.values() if entry.matrices]
# the quick tests ask about 8 bits, and not the interpreter
FEW = ["centered", *(entry.name for entry in CATALOG.values() if not entry.core)]


def trained(make, storage, place, dtype=BF16, shapes=SHAPES, steps=2, scale=None, sizes=0, **options):
    device, backend = place
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype).to(device)) for s in shapes]
    optimizer = make(params, lr=1e-2, storage=storage, backend=backend, seed=3, **options)
    if scale is not None:
        optimizer.grad_scale = torch.full((1,), scale, device=device)
        optimizer.found_inf = torch.zeros(1, device=device)
    for k in range(steps):
        for param in params:
            grad = torch.randn(param.shape, generator=generator) * 10.0**-k
            if sizes:
                grad *= torch.exp2(torch.randint(-sizes, sizes, grad.shape, generator=generator))
            param.grad = grad.to(dtype).to(device)
        optimizer.step()
    kept = [{"param": p.detach(), **optimizer.state[p]} for p in params]
    return [{name: value.cpu() for name, value in state.items()} for state in kept]


def assert_same(found, expected):
    for k, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name].dtype == value.dtype
            same = torch.equal(ours[name].flatten().view(torch.uint8), value.flatten().view(torch.uint8))
            assert same, f"{name} of parameter {k}"


def cases():
    """The quick tests ask every rule about 8 bits, and core ones about one other preset, each about its own. Of rules
    with many stages they ask the interpreter, which takes long, about 8 bits alone."""
    for k, name in enumerate(RULES):
        for storage in ("exact", "16bit", "8bit"):
            for place in (p for p in PLACES if p.id != "cpu-eager"):
                if name in MULTIPLYING and place.values[0][0] == "cuda":
                    continue  # products of matrices have the bits of the device
                slow = place.id == "cpu-triton" and name in ("AdamP", "BertAdam", "clipped") and storage != "8bit"
                slow = slow or (name in FEW and (storage != "8bit" or place.id == "cpu-triton"))
                slow = slow or (name != "AdamW" and storage == ("exact", "16bit")[k % 2])
                marks = [*place.marks, *([pytest.mark.exhaustive] if slow else [])]
                yield pytest.param(name, storage, *place.values, id=f"{name}-{storage}-{place.id}", marks=marks)


@pytest.mark.parametrize(("name", "storage", "place"), list(cases()))
def test_every_backend_has_the_same_bits(name, storage, place, monkeypatch):
    shapes = SHAPES
    if name in MULTIPLYING and place == ("cpu", "triton"):  # by the same products, so that all else can be compared
        monkeypatch.setattr("fusedadam.backends.triton.orthogonal.multiplies", lambda *_: False)
    if place == ("cpu", "triton"):  # the interpreter takes its time
        shapes = SHAPES[:1] if name in ("AdamP", "BertAdam", "EmaAdamW") else SHAPES[:2]
    expected = trained(RULES[name], storage, ("cpu", "eager"), shapes=shapes)
    assert_same(trained(RULES[name], storage, place, shapes=shapes), expected)


@pytest.mark.filterwarnings("ignore:fusedadam. storage= keeps float16")
@pytest.mark.parametrize("place", [p for p in PLACES if p.id not in ("cpu-eager", "cpu-triton")])
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "AdamP", "EmaAdamW"])
def test_other_dtypes_have_the_same_bits(name, dtype, place):
    for storage in ("16bit", "8bit") if name == "AdamW" else ("8bit",) if dtype == F32 else ("16bit",):
        expected = trained(RULES[name], storage, ("cpu", "eager"), dtype)
        assert_same(trained(RULES[name], storage, place, dtype), expected)


@pytest.mark.parametrize("place", [p for p in PLACES if p.id not in ("cpu-eager", "cpu-triton")])
def test_scaled_gradients_have_the_same_bits(place):
    expected = trained(AdamW, "8bit", ("cpu", "eager"), scale=4.0)
    assert_same(trained(AdamW, "8bit", place, scale=4.0), expected)


@pytest.mark.parametrize("place", [p for p in PLACES if p.id != "cpu-eager"])
def test_linear8_has_the_same_bits(place):
    """Of values of all sizes in a block: presets take it for products of matrices, whose bits differ."""
    storage = {"param": "bf16+8", "exp_avg": "linear8", "exp_avg_sq": "slice8"}
    make = functools.partial(AdamW, betas=(0.5, 0.999))
    expected = trained(make, storage, ("cpu", "eager"), shapes=SHAPES[:2], sizes=40)
    assert_same(trained(make, storage, place, shapes=SHAPES[:2], sizes=40), expected)
    assert (expected[0]["exp_avg_steps"] == 0).any()
    assert (expected[0]["exp_avg_steps"].abs() == 127).any()


def test_threads_and_chunks_do_not_matter():
    """Several chunks of one tensor, on one thread and on all."""
    many = trained(AdamW, "8bit", ("cpu", "numba"), shapes=[(700, 128)])
    with threads(1):
        assert_same(trained(AdamW, "8bit", ("cpu", "numba"), shapes=[(700, 128)]), many)
    assert_same(trained(AdamW, "8bit", ("cpu", "eager"), shapes=[(700, 128)]), many)


def test_a_step_depends_on_the_seed():
    one, other = (trained(AdamW, "8bit", ("cpu", "numba")) for _ in range(2))
    assert_same(one, other)
    seeded = trained(functools.partial(AdamW, betas=(0.9, 0.99)), "8bit", ("cpu", "numba"))
    assert not torch.equal(seeded[0]["exp_avg_sq_codes"], one[0]["exp_avg_sq_codes"])
