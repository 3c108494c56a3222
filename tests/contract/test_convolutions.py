"""8 bits of convolutions: blocks run along all dimensions but the first or, in channels_last, along the channels."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch

from fusedadam import AdamP, AdamW, FusedOptimizer, Muon, RowValue, Scalar, State, Value, rule
from fusedadam.contract import advice
from fusedadam.ops import sqrt, sum_last
from tests.support import PLACES

BF16, CHANNELS_LAST = torch.bfloat16, torch.channels_last
KINDS = {
    "row-major": torch.ones(16, 32, 3, 3),
    "patches": torch.ones(16, 3, 16, 16),
    "one dimension": torch.ones(64, 96, 5),
    "channels_last": torch.ones(16, 32, 3, 3).to(memory_format=CHANNELS_LAST),
    "channels_last_3d": torch.ones(64, 32, 3, 3, 3).to(memory_format=torch.channels_last_3d),
    "channels_last with gaps": torch.ones(64, 64, 3, 3).to(memory_format=CHANNELS_LAST)[:, :32],
    "1 x 1 in channels_last": torch.ones(64, 96, 1, 1).to(memory_format=CHANNELS_LAST),
}


def gradient(param, seed):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(param.shape, generator=generator) * 0.1).to(param).contiguous()


def trained(kind, make=AdamW, steps=3, device="cpu", **options):
    param = torch.nn.Parameter(KINDS[kind].to(BF16).to(device))
    optimizer = make([param], lr=1e-2, storage="8bit", **options)
    go(param, optimizer, range(steps))
    return param, optimizer


def go(param, optimizer, steps):
    for step in steps:
        param.grad = gradient(param, step)
        optimizer.step()


def assert_same(found, expected):
    (param, optimizer), (other, its) = found, expected
    assert torch.equal(param.cpu(), other)
    assert optimizer.state[param].keys() == its.state[other].keys()
    for name, value in its.state[other].items():
        assert torch.equal(optimizer.state[param][name].cpu(), value), name


def values_of(param, optimizer):
    return optimizer.widen_state_dict(optimizer.state_dict())["state"][0]


@pytest.mark.parametrize("kind", KINDS)
def test_they_take_5_bytes_an_element(kind):
    param, optimizer = trained(kind, steps=1)
    kept = [param, *(v for name, v in optimizer.state[param].items() if name != "step")]
    assert sum(t.numel() * t.element_size() for t in kept) / param.numel() == 5.0625


@pytest.mark.parametrize("place", [p for p in PLACES if p.id != "cpu-eager"])
@pytest.mark.parametrize(("kind", "make"), [("row-major", AdamP), ("channels_last", AdamW)])
def test_every_backend_has_the_same_bits(kind, place, make):
    device, backend = place
    expected = trained(kind, make, steps=2, backend="eager")
    assert_same(trained(kind, make, steps=2, device=device, backend=backend), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_averages_are_those_of_float32(kind):
    """Each value is off by rounding alone: an eighth of a binade, or what is lost far below a block's largest."""
    param, optimizer = trained(kind, steps=1)
    other = torch.nn.Parameter(KINDS[kind].clone())
    reference = torch.optim.AdamW([other], lr=1e-2)
    go(other, reference, range(1))
    for name in ("exp_avg", "exp_avg_sq"):
        expected, found = reference.state[other][name], values_of(param, optimizer)[name]
        assert (found - expected).abs().le(expected.abs() / 4 + expected.abs().max() * 2**-12).all(), name


def test_a_resumed_run_goes_on_to_the_bit():
    for kind in ("row-major", "channels_last"):
        param, optimizer = trained(kind)
        file = io.BytesIO()
        torch.save((param.detach(), optimizer.state_dict()), file)
        file.seek(0)
        weight, saved = torch.load(file, weights_only=True)
        resumed = torch.nn.Parameter(weight)
        again = AdamW([resumed], storage="8bit")
        again.load_state_dict(saved)
        copied, its = copy.deepcopy((param, optimizer))
        for each, of in ((param, optimizer), (resumed, again), (copied, its)):
            go(each, of, range(3, 5))
        assert_same((resumed, again), (param, optimizer))
        assert_same((copied, its), (param, optimizer))


@pytest.mark.parametrize("now", ["row-major", "channels_last"])
def test_states_follow_another_memory_format(now):
    """By loading, and where the model's is changed between steps: values are rounded into the other blocks."""
    before = "channels_last" if now == "row-major" else "row-major"
    param, optimizer = trained(before)
    values = values_of(param, optimizer)
    other = torch.nn.Parameter(KINDS[now].to(BF16))
    loading = AdamW([other], lr=1e-2, storage="8bit")
    with torch.no_grad():
        other.copy_(param)
    loading.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(value, values_of(other, loading)[name]) for name, value in values.items())
    param.data = param.data.to(memory_format=CHANNELS_LAST if now == "channels_last" else torch.contiguous_format)
    for each, of in ((param, optimizer), (other, loading)):
        go(each, of, range(3, 4))
    assert_same((param, optimizer), (other, loading))
    assert optimizer.state[param]["exp_avg_exponents"].shape == ((16, 9) if now == "row-major" else (16, 3, 3, 1))


@pytest.mark.parametrize(
    ("shape", "memory_format", "why"),
    [
        ((128, 3, 7, 7), torch.contiguous_format, "product of all dimensions but the first not divisible by 32"),
        ((64, 40, 3, 3), CHANNELS_LAST, "channels_last, and channels not divisible by 32"),
        ((64, 32, 4, 32), CHANNELS_LAST, "channels_last, and last dimension divisible by 32"),
    ],
)
def test_without_blocks_they_are_kept_exactly(shape, memory_format, why):
    param = torch.nn.Parameter(torch.ones(shape, dtype=BF16).to(memory_format=memory_format))
    optimizer = AdamW([torch.nn.Parameter(torch.ones(1024, 1024)), param], storage="8bit")
    chosen = optimizer.storage_of(optimizer.param_groups[0], param)
    assert chosen.formats == {"param": "bf16_16", "exp_avg": "f32", "exp_avg_sq": "f32"}
    assert {*chosen.reasons.values()} == {why}
    go(param, optimizer, range(1))


def by_row_scalars(lr, step):
    return {"lr": lr}


@rule(scalars=by_row_scalars)
def by_row(param: Value, grad: Value, momentum: Value, row_var: RowValue, lr: Scalar):
    row_var = sum_last(grad * grad)
    momentum = 0.9 * momentum + grad / sqrt(row_var + 1e-8)
    param = param - lr * momentum
    return param, momentum, row_var


def test_states_by_row_need_blocks_along_the_last_dimension():
    """Kernels walk along it, and a block must not lie in two rows."""

    class ByRow(FusedOptimizer):
        rule = by_row
        states = {"momentum": State(), "row_var": State(signed=False)}

        def __init__(self, params, lr=1e-3, storage=None, backend=None):
            super().__init__(params, lr=lr, storage=storage, backend=backend)

    convolution, experts = (torch.nn.Parameter(torch.ones(shape)) for shape in ((64, 32, 3, 3), (64, 64, 64)))
    optimizer = ByRow([convolution, experts], storage="8bit", backend="eager")
    for param in (convolution, experts):
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert "momentum" in optimizer.state[convolution]
    assert "momentum_codes" in optimizer.state[experts]


def test_a_model_that_stays_wide_is_said_once_at_the_line_that_makes_the_optimizer(monkeypatch):
    monkeypatch.setattr(advice, "_told", set())
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 7), torch.nn.Conv2d(64, 8, 3, groups=8)).bfloat16()
    with pytest.warns(UserWarning, match=r"storage= saves little here: AdamW keeps 9\d% .*product of all") as caught:
        AdamW(net.parameters(), storage="8bit")
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AdamW(net.parameters(), storage="8bit")  # once
        AdamW(torch.nn.Linear(40, 40).parameters(), storage="8bit")  # it has nothing to save
        AdamW(torch.nn.Conv2d(64, 64, 3).parameters(), storage="8bit")


def test_products_of_matrices_walk_row_by_row_so_channels_last_stays_wide():
    """Blocks ran along the channels, and kernels along the rows: what was saved belonged to other elements."""
    weights = torch.randn(64, 32, 3, 3, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 33).view(32, 1, 1)
    found = []
    for format_ in (torch.contiguous_format, CHANNELS_LAST):
        param = torch.nn.Parameter(weights.to(BF16).to(memory_format=format_))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it stays wide
            optimizer = Muon([param], lr=1e-2, storage="8bit")
        go(param, optimizer, range(3))
        found.append((optimizer, values_of(param, optimizer)["momentum_buffer"]))
    (by_rows, coded), (by_channels, exact) = found
    assert "momentum_buffer_steps" in next(iter(by_rows.state.values()))
    assert "not row-major" in str(by_channels.memory_summary())
    torch.testing.assert_close(coded, exact.contiguous(), rtol=0, atol=0.1 * float(exact.abs().max()))
    (param,) = by_rows.state
    before = values_of(param, by_rows)["momentum_buffer"]
    param.data = param.data.to(memory_format=CHANNELS_LAST)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_rows.param_groups[0]["momentum"] = 1.0  # keeps what there is
        go(param, by_rows, [3])
    assert torch.equal(values_of(param, by_rows)["momentum_buffer"].contiguous(), before.contiguous())
