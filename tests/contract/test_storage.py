"""What users do with an optimizer, with storage formats: resume, convert, move states, write weights, scale, hook."""

from __future__ import annotations

import copy

import pytest
import torch

from fusedadam import AdamP, AdamW, EmaAdamW
from fusedadam.formats import Array, Format, register
from fusedadam.formats.format import bits_of_float, float_of_bits

PRESETS = ["exact", "16bit", "8bit"]


def model(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)).to(dtype)


def train(net, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in net.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def trained(make, steps, net=None, **options):
    """A model and its optimizer after some steps."""
    net = model() if net is None else net
    optimizer = make(net.parameters(), **options)
    train(net, optimizer, steps)
    return net, optimizer


def contents(net, optimizer):
    return [{"param": p.detach(), **optimizer.state[p]} for p in net.parameters()]


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name].reshape(-1), theirs[name].reshape(-1)) for name in theirs)


@pytest.mark.filterwarnings("ignore:the state dict has param_low", "ignore:fusedadam. storage= keeps float16")
@pytest.mark.parametrize("make", [EmaAdamW, AdamP])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("before", [None, *PRESETS])
@pytest.mark.parametrize("after", [None, *PRESETS])
def test_a_changed_storage_and_a_loaded_state_dict_give_the_same(before, after, dtype, make):
    """From 8 bits to None, states of bfloat16 parameters became bfloat16 in one way, and float32 in the other."""
    if dtype == torch.float16 and "exact" in (before, after):
        pytest.skip("float16 has no exact storage")
    net, optimizer = trained(make, 2, net=model(dtype), storage=before, backend="eager")
    other = copy.deepcopy(net)
    loading = make(other.parameters(), storage=after, backend="eager")
    loading.load_state_dict(optimizer.state_dict())
    assert loading.param_groups[0]["storage"] == after
    optimizer.param_groups[0]["storage"] = after
    saved, loaded = (make.widen_state_dict(each.state_dict())["state"] for each in (optimizer, loading))
    for key, states in saved.items():
        for name, value in states.items():
            if after is None:  # every state has the bits that it had
                assert torch.equal(loaded[key][name].float(), value)
            elif name != "exp_avg_sq":  # which has less room in 8 bits
                assert torch.allclose(loaded[key][name], value, rtol=0.07, atol=2e-4 * value.abs().max())
    for each, its in ((net, optimizer), (other, loading)):
        train(each, its, 1, seed=1)
    assert_same(contents(other, loading), contents(net, optimizer))
    assert [{k: v.dtype for k, v in state.items()} for state in contents(other, loading)] == [
        {k: v.dtype for k, v in state.items()} for state in contents(net, optimizer)
    ]
    if (before, after) == ("8bit", None):
        assert optimizer.state[net[0].weight]["exp_avg"].dtype == torch.float32


@pytest.mark.filterwarnings("ignore:the state dict has param_low")
def test_a_dtype_that_is_asked_for_is_what_8_bits_become():
    net, optimizer = trained(EmaAdamW, 2, storage="8bit", backend="eager")
    other = copy.deepcopy(net)
    loading = EmaAdamW(other.parameters(), backend="eager")
    given = optimizer.state_dict()
    given["param_groups"][0].update(state_dtype=torch.float16, ema_dtype=torch.float64)
    loading.load_state_dict(given)
    optimizer.param_groups[0].update(storage=None, state_dtype=torch.float16, ema_dtype=torch.float64)
    for each, its in ((net, optimizer), (other, loading)):
        train(each, its, 1, seed=1)
        state = its.state[each[0].weight]
        assert [state[n].dtype for n in ("exp_avg", "ema_params")] == [torch.float16, torch.float64]
    assert_same(contents(other, loading), contents(net, optimizer))


@pytest.mark.parametrize("storage", ["16bit", "8bit"])
@pytest.mark.parametrize(
    "gapped",
    [
        lambda values: values.repeat(1, 2)[:, :64],
        lambda values: values.repeat(2, 1).view(2, 128, 64)[::2][0],
        lambda values: values.repeat_interleave(2, 0)[::2],
        lambda values: values.t().contiguous().repeat(1, 2)[:, :128].t(),  # in another order, and with gaps
    ],
    ids=["columns", "dense", "rows", "transposed"],
)
def test_a_deepcopy_of_a_parameter_with_gaps_goes_on_to_the_bit(gapped, storage):
    """The copy has no gaps: it was eligible for 8 bits where the original was not."""
    net = torch.nn.Module()
    net.weight = torch.nn.Parameter(gapped(torch.randn(128, 64, generator=torch.Generator().manual_seed(0)).bfloat16()))
    _, optimizer = trained(AdamW, 2, net, storage=storage)
    copied, its = copy.deepcopy((net, optimizer))
    for _ in range(3):
        for each, of in ((net, optimizer), (copied, its)):
            train(each, of, 2, seed=1)
        assert_same(contents(copied, its), contents(net, optimizer))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s: s.update(exp_avg_codes=s["exp_avg_codes"][:, :32]), "'exp_avg_codes' has shape"),
        (lambda s: s.update(exp_avg_exponents=s["exp_avg_exponents"][:, :1]), "it needs one for 32 neighbors"),
        (lambda s: s.update(exp_avg_codes=s["exp_avg_codes"].short()), "dtype int16; it must be one of uint8"),
        (lambda s: s.pop("exp_avg_exponents"), "only a part of what 'exp_avg' is kept in"),
        (lambda s: s.update(param_low=s["param_low"].float()), "'param_low' has dtype float32"),
    ],
)
def test_codes_that_do_not_fit_are_refused_and_nothing_is_loaded(change, match):
    net, optimizer = trained(AdamW, 1, storage="8bit")
    before = copy.deepcopy(contents(net, optimizer))
    state_dict = copy.deepcopy(optimizer.state_dict())
    change(state_dict["state"][0])
    with pytest.raises((ValueError, RuntimeError), match=match):
        optimizer.load_state_dict(state_dict)
    assert_same(contents(net, optimizer), before)


def test_negative_second_moments_are_refused():
    net, optimizer = trained(AdamW, 1)
    state_dict = optimizer.state_dict()
    state_dict["state"][0]["exp_avg_sq"] = -torch.ones_like(state_dict["state"][0]["exp_avg_sq"])
    with pytest.raises(ValueError, match="negative values in 'exp_avg_sq'"):
        AdamW(net.parameters(), storage="8bit").load_state_dict(state_dict)


@pytest.mark.parametrize("storage", PRESETS)
def test_low_bits_stay_when_states_are_loaded_after_weights(storage):
    net, exact = model(), model(torch.float32)
    donor = AdamW(net.parameters())
    train(net, donor, 1)
    optimizer = AdamW(net.parameters(), storage=storage)
    optimizer.load_float32_state_dict(net, exact.state_dict())
    untrained = optimizer.state_dict()
    before = optimizer.float32_state_dict(net)
    optimizer.load_state_dict(donor.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in optimizer.float32_state_dict(net).items())
    AdamW(net.parameters(), storage=storage).load_state_dict(untrained)  # before its first step


@pytest.mark.parametrize("storage", PRESETS)
@pytest.mark.parametrize("entries", ["none", "one", "an empty one"])
@pytest.mark.parametrize("make", [AdamW, EmaAdamW])
def test_low_bits_stay_when_a_state_dict_has_no_entry_for_their_weight(make, entries, storage):
    """They were dropped, and the weights with them jumped to the nearest bfloat16."""
    net, optimizer = trained(make, 2, storage=storage)
    given = copy.deepcopy(make(net.parameters()).state_dict())
    if entries != "none":
        given["state"][1] = AdamW.widen_state_dict(optimizer.state_dict())["state"][1] if entries == "one" else {}
    before = optimizer.float32_state_dict(net)
    optimizer.load_state_dict(given)
    assert all(torch.equal(value, before[name]) for name, value in optimizer.float32_state_dict(net).items())
    steps = [optimizer.state[param]["step"].item() for param in net.parameters()]
    assert steps == [0, 2 if entries == "one" else 0, 0, 0]
    # as a new optimizer that is given the same weights
    fresh = model()
    expected = make(fresh.parameters(), storage=storage)
    expected.load_float32_state_dict(fresh, before)
    if entries != "one":
        assert_same(contents(net, optimizer), contents(fresh, expected))
        train(net, optimizer, 2, seed=1)
        train(fresh, expected, 2, seed=1)
        assert_same(contents(net, optimizer), contents(fresh, expected))
    make(net.parameters(), storage=storage).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("storage", PRESETS)
@pytest.mark.parametrize("write", ["copy_", "data", "zero_", "infinite"])
def test_a_weight_that_someone_else_writes_stays_a_number(storage, write):
    net, optimizer = trained(AdamW, 3, storage=storage, lr=1e-3)
    weight = net[0].weight
    with torch.no_grad():
        if write == "zero_":
            weight.zero_()
        elif write == "copy_":
            weight.copy_(-torch.zeros_like(weight))
        elif write == "data":
            weight.data = torch.zeros_like(weight)
        else:
            weight.fill_(torch.inf)
    train(net, optimizer, 1, seed=1)
    assert not weight.isnan().any()
    if write != "infinite":
        assert weight.abs().max() < 0.01


@pytest.mark.parametrize("storage", PRESETS)
def test_averages_are_put_in_and_taken_out_exactly(storage):
    net, optimizer = trained(EmaAdamW, 3, storage=storage, ema_decay=0.5)
    before = copy.deepcopy(contents(net, optimizer))
    with optimizer.ema_weights():
        averaged = [p.detach().clone() for p in net.parameters()]
        with pytest.raises(RuntimeError, match="inside ema_weights"):
            optimizer.float32_state_dict(net)
        with pytest.raises(RuntimeError, match="inside ema_weights"):
            optimizer.load_float32_state_dict(net, model(torch.float32).state_dict())
    assert_same(contents(net, optimizer), before)
    saved = optimizer.ema_state_dict(net)
    assert all(torch.equal(a, b) for a, b in zip(averaged, saved.values(), strict=True))
    wide = optimizer.ema_state_dict(net, dtype=torch.float32)
    assert all(torch.equal(wide[name].to(torch.bfloat16), value) or storage != "exact" for name, value in saved.items())
    assert wide["0.weight"].dtype == torch.float32
    assert not torch.equal(wide["0.weight"], saved["0.weight"].float())


@pytest.mark.parametrize("storage", PRESETS)
@pytest.mark.parametrize("how", ["assigned", "data"])
def test_states_that_are_moved_away_and_back(storage, how):
    """Trainers of reinforcement learning keep states elsewhere between phases; here, as copies with other addresses."""
    nets = [model(), model()]
    optimizers = [EmaAdamW(net.parameters(), storage=storage) for net in nets]
    for net, optimizer in zip(nets, optimizers, strict=True):
        train(net, optimizer, 2)
    for state in optimizers[0].state.values():
        for name, value in state.items():
            away = value.clone()
            if how == "assigned":
                state[name] = away.clone()
            else:
                value.data = torch.empty(0, dtype=value.dtype)
                value.data = away
    for net, optimizer in zip(nets, optimizers, strict=True):
        train(net, optimizer, 2, seed=1)
    assert_same(contents(nets[0], optimizers[0]), contents(nets[1], optimizers[1]))


def decode_twice(high, low):
    return float_of_bits((high << 16) | (low & 0xFFFF))


def encode_twice(x):
    bits = bits_of_float(x)
    return bits >> 16, (bits << 16) >> 16


def decode_once(bits):
    return float_of_bits(bits)


def encode_once(x):
    return bits_of_float(x)


OWN = {
    "two arrays": ((Array(torch.int16, "_upper"), Array(torch.int16, "_lower")), decode_twice, encode_twice),
    "one array": ((Array(torch.int32, "_upper"),), decode_once, encode_once),
}


@pytest.mark.parametrize("kind", OWN)
def test_a_format_of_ones_own_works_in_every_way(kind):
    from fusedadam.formats import FORMATS

    name = kind.replace(" ", "_")
    register(Format(name, *OWN[kind], "own", is_for="states"))
    try:
        nets = [model(), model()]
        optimizer = AdamW(nets[0].parameters(), storage={"exp_avg": "own", "exp_avg_sq": "own"})
        exact = AdamW(nets[1].parameters(), storage="exact")
        for net, each in ((nets[0], optimizer), (nets[1], exact)):
            train(net, each, 2)
        assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))
        optimizer.load_state_dict(optimizer.state_dict())
        assert "exp_avg_upper" in optimizer.state[nets[0][0].weight]
        wide = AdamW.widen_state_dict(optimizer.state_dict())["state"][0]["exp_avg"]
        assert torch.equal(wide, exact.state[nets[1][0].weight]["exp_avg"])
        optimizer.param_groups[0]["storage"] = "exact"
        for net, each in ((nets[0], optimizer), (nets[1], exact)):
            train(net, each, 1, seed=1)
        assert_same(contents(nets[0], optimizer), contents(nets[1], exact))
    finally:
        del FORMATS[name]


@pytest.mark.parametrize("storage", PRESETS)
def test_low_bits_do_not_outlive_their_weight(storage):
    """A model that becomes float32 takes them in."""
    net = torch.nn.Linear(64, 64, bias=False).bfloat16()
    _, optimizer = trained(EmaAdamW, 3, net, storage=storage, weight_decay=0.0)
    whole = optimizer.float32_state_dict(net)["weight"]
    wide = copy.deepcopy((net, optimizer))
    for dtype in (torch.float32, torch.float64):
        other, its = copy.deepcopy(wide)
        other.to(dtype)
        if dtype == torch.float32:
            assert torch.equal(its.float32_state_dict(other)["weight"], whole)  # before the step that takes them in
        its.param_groups[0]["lr"] = 0.0
        train(other, its, 1)
        assert torch.equal(other.weight.float(), whole)
        assert "param_low" not in its.state[other.weight]
    net.float()
    optimizer.load_float32_state_dict(net, {"weight": torch.ones(64, 64)})
    optimizer.param_groups[0]["lr"] = 0.0
    train(net, optimizer, 1)
    assert net.weight.eq(1).all()


@pytest.mark.parametrize("kept", [None, *PRESETS])
@pytest.mark.parametrize("steps", [0, 3])
def test_float32_weights_that_the_model_refuses_change_nothing(kept, steps):
    """torch loads what fits before it raises, and low bits of weights that were not loaded were gone."""
    net = torch.nn.Sequential(*model(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 8)).bfloat16()
    net[3].float()
    _, optimizer = trained(EmaAdamW, steps, net, storage=kept)
    before = copy.deepcopy((net.state_dict(), contents(net, optimizer)))
    whole = {name: torch.full(value.shape, 1 / 3) for name, value in net.state_dict().items()}
    refused = {
        "Missing key": {"0.weight": whole["0.weight"]},
        "Unexpected key": whole | {"another": torch.ones(2)},
        "size mismatch": whole | {"3.bias": torch.ones(2)},
    }
    for match, given in refused.items():
        with pytest.raises(RuntimeError, match=match):
            optimizer.load_float32_state_dict(net, given)
        assert all(torch.equal(value, before[0][name]) for name, value in net.state_dict().items())
        assert_same(contents(net, optimizer), before[1])
    optimizer.load_float32_state_dict(net, whole)
    loaded = optimizer.float32_state_dict(net)["0.weight"]
    assert (loaded - 1 / 3).abs().max() < (1e-3 if kept is None else 1e-5)


def test_float32_weights_that_a_hook_renames_leave_no_stale_bits():
    single = torch.nn.Linear(64, 64, bias=False).bfloat16()
    optimizer = AdamW(single.parameters(), storage="exact")
    train(single, optimizer, 3)

    def rename(module, state_dict, prefix, *_):
        state_dict["weight"] = state_dict.pop("old")

    single.register_load_state_dict_pre_hook(rename)
    optimizer.load_float32_state_dict(single, {"old": torch.ones(64, 64)})
    assert optimizer.float32_state_dict(single)["weight"].eq(1).all()


@pytest.mark.parametrize(("before", "after"), [("8bit", None), ("exact", "8bit"), (None, "16bit")])
def test_states_of_another_shape_are_refused_in_every_conversion(before, after):
    param = torch.nn.Parameter(torch.randn(64, 64).bfloat16())
    optimizer = AdamW([param], storage=before)
    param.grad = torch.randn_like(param)
    optimizer.step()
    param.grad = None
    param.data = torch.randn(3, 64, 64).bfloat16()
    param.grad = torch.randn_like(param)
    optimizer.param_groups[0]["storage"] = after
    with pytest.raises(RuntimeError, match=r"has shape \(64, 64\), but its param has \(3, 64, 64\)"):
        optimizer.step()


def test_a_state_of_which_a_part_is_gone_is_refused():
    param = torch.nn.Parameter(torch.randn(64, 64).bfloat16())
    optimizer = AdamW([param], storage="8bit")
    param.grad = torch.randn_like(param)
    optimizer.step()
    del optimizer.state[param]["exp_avg_exponents"]
    with pytest.raises(RuntimeError, match="state 'exp_avg' cannot be read: it has 'exp_avg_codes'"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="cannot be read"):
        AdamW.widen_state_dict(optimizer.state_dict())


def test_an_average_keeps_its_bits_when_storage_ends():
    param = torch.nn.Parameter(torch.randn(64, 64).bfloat16())
    optimizer = EmaAdamW([param], storage="exact", ema_decay=0.5, lr=1e-3)
    net = torch.nn.Module()
    net.weight = param
    train(net, optimizer, 3)
    whole = optimizer.ema_state_dict(net, dtype=torch.float32)["weight"]
    optimizer.param_groups[0].update(storage=None, ema_dtype=torch.float32, ema_decay=1.0, ema_warmup=False)
    train(net, optimizer, 1)
    assert torch.equal(optimizer.state[param]["ema_params"], whole)


def test_parameters_made_in_inference_mode_may_become_wider():
    with torch.inference_mode():
        param = torch.nn.Parameter(torch.randn(64, 64).bfloat16(), requires_grad=False)
        optimizer = AdamW([param], storage="exact", lr=1e-3)
        for _ in range(2):
            param.grad = torch.randn_like(param)
            optimizer.step()
        param.grad = None
        param.data = param.data.float()
        param.grad = torch.zeros_like(param)
        optimizer.step()
    assert "param_low" not in optimizer.state[param]
