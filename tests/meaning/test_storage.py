"""What storage formats promise: exact splits, unbiased rounding, averages that move, small steps that count.

Each promise has a control that must fail where the formats pass: the same formats rounded to nearest, and plain
bfloat16 weights.
"""

from __future__ import annotations

import pytest
import torch

from fusedadam import AdamW, Muon
from fusedadam.contract import role_arrays
from fusedadam.formats import FORMATS, nearest, register
from fusedadam.formats.noise import HALF, MULTIPLIERS, SPREAD, mixed, step_key
from fusedadam.formats.tensors import load, store

F32, BF16 = torch.float32, torch.bfloat16
NEAREST = {"param": "bf16+8_nearest", "exp_avg": "slice8_nearest", "exp_avg_sq": "slice8_nearest"}


@pytest.fixture(autouse=True)
def controls():
    for name in ("slice8", "slice8_signed", "linear8", "bf16_8", "bf16_stochastic"):
        register(nearest(FORMATS[name]))
    yield
    for name in [name for name in FORMATS if name.endswith("_nearest")]:
        del FORMATS[name]


def arrays_of(fmt, like):
    return [
        like.new_empty((*like.shape[:-1], like.shape[-1] // 32) if a.by == "block" else like.shape, dtype=a.dtype)
        for a in fmt.arrays
    ]


def round_trip(name, values, noise=None):
    arrays = arrays_of(FORMATS[name], values)
    store(FORMATS[name], arrays, values, noise)
    return load(FORMATS[name], arrays, F32)


def noise_of(shape, steps, role=2):
    """The noise of some steps, as kernels make it."""
    index = torch.arange(shape.numel(), dtype=torch.int32).view(shape)
    keys = step_key(torch.arange(1, steps + 1, dtype=torch.int32), torch.tensor(77, dtype=torch.int32))
    return (mixed(index * SPREAD + key) * MULTIPLIERS[role] for key in keys)


@pytest.mark.parametrize("role", range(len(MULTIPLIERS)))
def test_noise_is_uncorrelated(role):
    """Between neighbors, rows, steps and roles: less than half a percent, where independent noise has a tenth."""

    def correlation(a, b):
        return ((a - a.mean()) * (b - b.mean())).mean() / (a.std() * b.std())

    shape = torch.Size([1 << 20])
    noise = [words.double() for words in noise_of(shape, 6, role)]
    others = [next(noise_of(shape, 1, other)).double() for other in range(role)]
    for lag in (*range(1, 33), 64, 768, 1024, 4096):
        assert abs(correlation(noise[0][lag:], noise[0][:-lag])) < 0.005
    for other in (*noise[1:], *others):
        assert abs(correlation(noise[0], other)) < 0.005


def all_floats(every=1, begin=0, end=1 << 32):
    """Float32 by their bits."""
    for start in range(begin, end, every << 24):
        bits = torch.arange(start, min(start + (every << 24), end), every, dtype=torch.int64)
        yield ((bits + (1 << 31)) % (1 << 32) - (1 << 31)).to(torch.int32).view(F32)


def check_splits(values):
    is_nan = values.isnan()
    back = round_trip("bf16_16", values)
    assert torch.equal(back.view(torch.int32)[~is_nan], values.view(torch.int32)[~is_nan])
    assert back[is_nan].isnan().all()
    high, low = (torch.empty_like(values, dtype=array.dtype) for array in FORMATS["bf16_16"].arrays)
    store(FORMATS["bf16_16"], [high, low], values)
    assert ((high.float() - values).abs() <= (values.to(BF16).float() - values).abs())[values.isfinite()].all()
    # never a zero or an infinity whose low bits make it a NaN
    assert not ((high == 0) & (low < 0)).any()
    assert not (high.isinf() & (low > 0)).any()
    for noise in (HALF, 0, -1, 0x12345678):
        words = torch.full_like(values, noise, dtype=torch.int32) if noise != HALF else None
        near = round_trip("bf16_8", values, words)
        assert near[is_nan].isnan().all()
        assert torch.equal(near[values.isinf()], values[values.isinf()])
        normal = values.abs().ge(2.0**-126) & near.isfinite() & values.isfinite()
        error = ((near.double() - values.double()).abs() / values.double().abs())[normal]
        assert (error <= (2.0**-16 if noise == HALF else 2.0**-15)).all()
        assert torch.equal(round_trip("bf16_8", near, words)[~is_nan], near[~is_nan])  # what is stored stays


def test_splits_of_floats_of_every_kind():
    for values in all_floats(every=4099):
        check_splits(values)
    for begin in (0, 0x7F7F0000, 0x7F800000, 0x7FFF8000, 0x80000000, 0xFF7F0000, 0xFF800000, 0xFFFF8000):
        for values in all_floats(begin=begin, end=begin + 0x10000 if begin < 0xFFFF0000 else 1 << 32):
            check_splits(values)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(16))
def test_splits_of_all_floats(part):
    """As above, by their bits: neighbors that 24 bits have are 256 apart. It takes seconds where there is a GPU."""
    for each in all_floats(begin=part << 28, end=(part + 1) << 28):
        values = each.to("cuda" if torch.cuda.is_available() else "cpu")
        bits, numbers = values.view(torch.int32), ~values.isnan()
        for name, noise, apart in (("bf16_16", None, 0), ("bf16_8", None, 128), ("bf16_8", -1, 255)):
            words = None if noise is None else torch.full_like(bits, noise)
            back = round_trip(name, values, words)
            assert torch.equal(back.isnan(), ~numbers)
            assert ((back.view(torch.int32) - bits).abs() <= apart)[numbers].all()


@pytest.mark.parametrize(("name", "steps", "codes"), [("slice8", 4, 256), ("slice8_signed", 3, 128)])
def test_every_exponent_and_code_comes_back(name, steps, codes):
    """Blocks of all codes below a largest value, for every exponent."""
    fmt = FORMATS[name]
    for exponent in range(256):
        largest = min(codes - 1, (exponent << steps) | ((1 << steps) - 1))
        if exponent == 255:
            largest = (largest & ~((1 << steps) - 1)) | (1 << (steps - 1))  # the one NaN there is
        code = torch.arange(largest + 1)
        rest = (-len(code)) % 31
        code = torch.cat([code, code.new_full((rest,), largest)]).view(-1, 31)
        code = torch.cat([code, code.new_full((len(code), 1), largest)], 1).to(torch.uint8)
        if exponent == 255:  # between an infinity and a NaN there is nothing
            code = torch.where(code.gt(largest & ~((1 << steps) - 1)) & code.lt(largest), largest, code)
        exponents = torch.full((len(code), 1), exponent, dtype=torch.uint8)
        values = load(fmt, [code, exponents], F32)
        again = [torch.empty_like(code), torch.empty_like(exponents)]
        store(fmt, again, values)
        assert torch.equal(again[1], exponents)
        assert torch.equal(again[0], code)
        if name == "slice8" and exponent > 15:
            assert (values > 0).all() or values.isnan().any()
        if name == "slice8_signed":
            store(fmt, again, -values)
            assert torch.equal(again[0], code | 0x80)


def in_linear_steps(blocks, step_only=False):
    """What linear8 keeps, rounded to nearest, in float64 by hand."""
    largest = blocks.abs().amax(-1, keepdim=True)
    power = torch.exp2(largest.log2().floor())
    power = torch.where(largest > power * 127 / 64, 2 * power, power)
    step = power / 64
    if step_only:
        return step
    return ((blocks / step).abs() + 0.5).floor() * blocks.sign() * step


def test_linear8_is_linear():
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(4000, 32, generator=generator) * torch.exp2(torch.linspace(-90, 120, 4000).round())[:, None]
    blocks[::3, 5] = 2.0 ** torch.randint(-20, 20, (1334,), generator=generator) * 3
    blocks[1::3, 7] = blocks[1::3].abs().amax(-1) * torch.linspace(1, 2, 1333)  # around powers of two
    expected = in_linear_steps(blocks.double())
    assert torch.equal(round_trip("linear8", blocks).double(), expected)
    assert torch.equal(round_trip("linear8", expected.float()).double(), expected)  # what is stored stays
    noisy = round_trip("linear8", blocks, torch.full(blocks.shape, -1, dtype=torch.int32)).double()
    step = in_linear_steps(blocks.double(), step_only=True)
    assert ((noisy - blocks).abs() < step).all()


@pytest.mark.parametrize("largest", [0.0, 1e-36, 1e-33, 1.0])
def test_zeros_stay_zeros_in_linear8_whatever_the_noise(largest):
    """Momentum that is zero would be orthogonalized, and the noise of tiny blocks with it."""
    values = torch.zeros(2, 32)
    values[:, 0], values[1, 1:3] = largest, 1e-42
    back = round_trip("linear8", values, torch.full(values.shape, -1, dtype=torch.int32))
    assert not back[:, 1:].any()


@pytest.mark.parametrize("exponent", [0, 9, 100, 254])
def test_every_step_of_linear8_comes_back(exponent):
    codes = torch.arange(-127, 128, dtype=torch.int8)
    codes = torch.cat([codes, codes.new_zeros(-len(codes) % 31)]).view(-1, 31)
    codes = torch.cat([codes, codes.new_full((len(codes), 1), 127)], 1)
    exponents = torch.full((len(codes), 1), exponent, dtype=torch.uint8)
    if exponent == 0:
        codes = torch.zeros_like(codes)
    values = load(FORMATS["linear8"], [codes, exponents], F32)
    assert torch.equal(values.double(), codes.double() * 2.0 ** (exponent - 127 - 6))
    again = [torch.empty_like(codes), torch.empty_like(exponents)]
    store(FORMATS["linear8"], again, values)
    assert torch.equal(again[0], codes)


def test_errors_of_linear8_are_a_third_of_slice8s():
    """Of a block as a whole; the control: small values of a block are better off in slice8."""
    values = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    small = values.abs() < 0.02
    noise = next(noise_of(values.shape, 1))
    linear, slices = (round_trip(name, values, noise) - values for name in ("linear8", "slice8_signed"))
    assert linear.norm() < slices.norm() / 3
    assert slices[small].norm() < linear[small].norm() / 3


def test_muon_keeps_momentum_in_linear_steps_and_other_optimizers_do_not():
    params = [torch.nn.Parameter(torch.zeros(64, 64)), torch.nn.Parameter(torch.zeros(64))]
    muon = Muon([{"params": params, "use_muon": None}], storage="8bit")
    group = muon.param_groups[0]
    assert Muon.storage_of(group, params[0]).formats["momentum_buffer"] == "linear8"
    assert muon.storage_of({**group, "use_muon": False}, params[0]).formats["exp_avg"] == "slice8_signed"
    asked = {"momentum_buffer": "slice8"}
    assert Muon.storage_of({**group, "storage": asked}, params[0]).formats["momentum_buffer"] == "slice8_signed"
    adamw = AdamW(params, storage="8bit")
    assert AdamW.storage_of(adamw.param_groups[0], params[0]).formats["exp_avg"] == "slice8_signed"


def test_orthogonalized_momentum_in_linear_steps_stays_near_that_of_float32():
    """Momentum of a gradient with singular values over two decades, and noise: directions in which it is small are
    lifted to the size of all others, and rounding errors with them. The control: slice8 is twice as far off."""
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(64, 64, generator=generator))[0] for _ in range(2))
    signal = (u * torch.logspace(0, -2, 64)) @ v
    found = {}
    for storage in (None, {"momentum_buffer": "linear8"}, {"momentum_buffer": "slice8"}):
        noise, param = torch.Generator().manual_seed(1), torch.nn.Parameter(torch.zeros(64, 64, dtype=F32))
        optimizer = Muon([param], lr=1.0, weight_decay=0.0, storage=storage, backend="eager")
        for _ in range(40):
            param.grad = signal + 1e-2 * torch.randn(64, 64, generator=noise)
            before = param.detach().clone()
            optimizer.step()
        found[str(storage)] = before - param.detach()
    exact, linear, slices = found.values()
    assert (linear - exact).norm() < 0.3 * exact.norm()
    assert (slices - exact).norm() > 2 * (linear - exact).norm()


def test_zeros_infinities_and_nan():
    for name in ("slice8", "slice8_signed", "linear8"):
        assert round_trip(name, torch.zeros(2, 32)).eq(0).all()
        values = torch.ones(2, 32)
        values[0, 3] = torch.inf
        values[1, 7] = torch.nan
        back = round_trip(name, values)
        assert back[0, 3].isinf()
        assert back[1, 7].isnan()
        assert torch.isfinite(back).sum() == 62  # and what they cost is their own block
    tiny = torch.full((1, 32), 2.0**-111)
    tiny[0, 0] *= 2.0**14
    assert round_trip("slice8", tiny).gt(0).all()
    subnormal = torch.full((1, 32), 1e-42)
    assert round_trip("slice8", subnormal).abs().le(2e-38).all()
    for name in ("bf16_stochastic", "bf16_8", "bf16_16"):
        special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
        for words in (None, torch.full((5,), -1, dtype=torch.int32)):
            back = round_trip(name, special, words if FORMATS[name].takes_noise else None)
            assert torch.equal(back[:4].view(torch.int32), special[:4].view(torch.int32))
            assert back[4].isnan()


def bias(name, values, steps, role):
    """The mean error of stochastic rounding, in standard errors of the mean, for each element."""
    total, squares = torch.zeros(values.shape, dtype=torch.float64), torch.zeros(values.shape, dtype=torch.float64)
    for noise in noise_of(values.shape, steps, role):
        error = round_trip(name, values, noise).double() - values.double()
        total += error
        squares += error**2
    mean = total / steps
    spread = (squares / steps - mean**2).clamp(min=0).sqrt() / steps**0.5
    return mean, spread


@pytest.mark.parametrize(
    ("name", "role"), [("slice8", 2), ("slice8_signed", 1), ("linear8", 1), ("bf16_stochastic", 1), ("bf16_8", 0)]
)
def test_rounding_is_unbiased(name, role):
    """Within 14 binades of a block's largest value: for each binade the pooled error is within 4 standard errors."""
    generator = torch.Generator().manual_seed(0)
    binade = torch.arange(13).repeat_interleave(28 * 9)
    rest = torch.exp2(-binade - torch.rand(len(binade), generator=generator)).view(-1, 28)
    blocks = torch.cat([torch.full((len(rest), 1), 1.9), rest, rest[:, :3]], 1)
    if name != "slice8":
        blocks = blocks * (1 - 2 * torch.randint(2, blocks.shape, generator=generator))
    mean, spread = bias(name, blocks, 2000, role)
    mean, spread = mean[:, 1:29].flatten(), spread[:, 1:29].flatten()
    for k in range(13):
        chosen = binade == k
        pooled = mean[chosen].sum().abs() / spread[chosen].square().sum().sqrt()
        assert pooled < 4, f"binade {k}: {pooled:.1f} standard errors"
    nearest_error = round_trip(f"{name}_nearest", blocks).double() - blocks.double()
    assert (nearest_error[:, 1:29].flatten().abs() > 8 * spread).double().mean() > 0.5  # the control is biased


def moments(storage, steps=3000):
    """(exp_avg, exp_avg_sq) after some steps, and after as many with gradients a quarter as large in half of each
    block."""
    generator = torch.Generator().manual_seed(0)
    sigma = torch.exp(0.7 * torch.randn(64, 64, generator=generator))  # squared, 14 binades in a block
    param = torch.nn.Parameter(torch.zeros(64, 64, dtype=BF16))
    optimizer = AdamW([param], lr=1e-3, betas=(0.9, 0.999), storage=storage, backend="numba")
    found = []
    for half in range(2):
        if half:
            sigma[:, ::2] /= 4
        for _ in range(steps):
            param.grad = (torch.randn(64, 64, generator=generator) * sigma).to(BF16)
            optimizer.step()
        state = optimizer.state[param]
        found.append([role_arrays.value_of(n, state, AdamW.states).double().clone() for n in ("exp_avg", "exp_avg_sq")])
    return found


def test_averages_move_as_those_of_float32_do():
    """With the noise that docs/numerics.md states: root mean square, of first and of second moments."""
    exact = moments("exact")
    for storage, first, second in (("8bit", 0.09, 0.185), ("16bit", 0.01, 0.06)):
        for ours, theirs in zip(moments(storage), exact, strict=True):
            assert abs((ours[1] / theirs[1]).mean() - 1) < 0.03
            assert (ours[1] / theirs[1] - 1).square().mean().sqrt() < second
            assert (ours[0] - theirs[0]).norm() / theirs[0].norm() < first
    control = moments(NEAREST)
    assert all(abs((ours[1] / theirs[1]).mean() - 1) > 0.3 for ours, theirs in zip(control, exact, strict=True))


def movement(storage, lr, dtype=BF16, steps=400):
    """How far weights near 1 move, along the way that float32 moves."""
    generator = torch.Generator().manual_seed(0)
    start = (1 + torch.rand(64, 64, generator=generator)).to(BF16)
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(start.to(dtype, copy=True))
    drift = torch.randn(64, 64, generator=generator)
    optimizer = AdamW([model.weight], lr=lr, weight_decay=0.0, storage=storage, backend="numba")
    for _ in range(steps):
        model.weight.grad = (drift + torch.randn(64, 64, generator=generator)).to(BF16).to(dtype)
        optimizer.step()
    return optimizer.float32_state_dict(model)["weight"].double() - start.double()


@pytest.mark.parametrize("lr", [1e-4, 1e-5, 1e-6])
def test_small_steps_count(lr):
    exact = movement("exact", lr)
    assert torch.equal(exact, movement(None, lr, F32))

    def kept(moved):
        return (moved * exact).sum() / (exact * exact).sum()

    for storage in ({"param": "bf16+8"}, "8bit", "16bit"):
        assert abs(kept(movement(storage, lr)) - 1) < 0.02
    assert kept(movement(None, lr)) < 0.9  # plain bfloat16 weights
    if lr < 1e-5:
        assert kept(movement({"param": "bf16+8_nearest"}, lr)) < 0.5
