"""Which format each role is kept in."""

from __future__ import annotations

import collections
import functools
import itertools
import warnings

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import fusedadam
from fusedadam import AdamW, EmaAdamW, RMSprop, RMSpropTF
from fusedadam.catalog import CATALOG
from fusedadam.contract import advice
from fusedadam.contract.role_arrays import value_of

BF16, F32, F16, F64 = torch.bfloat16, torch.float32, torch.float16, torch.float64
# one number for the parameter, beside two moments
(WITH_A_NUMBER,) = (entry.name for entry in CATALOG.values() if entry.float32_twin)


def bytes_of(optimizer, param):
    """Of one element, weights and states, without the step."""
    kept = [param, *(v for k, v in optimizer.state[param].items() if k != "step")]
    return sum(t.numel() * t.element_size() for t in kept) / param.numel()


def stepped(make, dtype, shape=(64, 128)):
    param = torch.nn.Parameter(torch.randn(shape).to(dtype))
    param.grad = torch.randn(shape).to(dtype)
    optimizer = make([param])
    optimizer.step()
    return optimizer, param


LIKE_ADAM = ("AdamW", "Adam", "AdamP", "BertAdam", "Adadelta", "Lamb", "RAdam")


@pytest.mark.filterwarnings("ignore:fusedadam. storage= keeps float16")
@pytest.mark.parametrize(
    ("name", "options", "dtype", "expected"),
    [
        *((name, {}, BF16, (12, 8, 5.0625)) for name in LIKE_ADAM),
        (WITH_A_NUMBER, {}, BF16, tuple(4 / 8192 + n for n in (12, 8, 5.0625))),
        ("Adafactor", {}, BF16, tuple((64 + 128) * 4 / 8192 + n for n in (4, 4, 3))),  # and one for each row and column
        ("SGD", {}, BF16, (4, 4, 3)),
        ("SGD", {"momentum": 0.9}, BF16, (8, 6, 4.03125)),
        *((name, {}, BF16, (8, 6, 4.03125)) for name in ("RMSprop", "RMSpropTF", "Lion")),
        *((name, {"momentum": 0.9}, BF16, (12, 8, 5.0625)) for name in ("RMSprop", "RMSpropTF")),
        *((name, {"momentum": 0.9, "centered": True}, BF16, (16, 14, 12.03125)) for name in ("RMSprop", "RMSpropTF")),
        ("AdEMAMix", {}, BF16, (16, 10, 7.0625)),
        ("Adan", {}, BF16, (20, 14, 10.09375)),
        ("EmaAdamW", {}, BF16, (16, 12, 8.0625)),
        ("ScheduleFreeAdamW", {}, BF16, (12, 10, 7.03125)),
        ("AdamW", {"amsgrad": True}, BF16, (16, 14, 12.03125)),
        ("AdamW", {}, F32, (12, 8, 6.0625)),
        ("AdamW", {}, F16, (None, 6, 4.0625)),
    ],
)
def test_bytes_per_parameter_are_as_documented(name, options, dtype, expected):
    for preset, count in zip(("exact", "16bit", "8bit"), expected, strict=True):
        if count is not None:
            chosen = {**options, "storage": preset, "backend": "eager"}  # which compiles nothing
            optimizer, param = stepped(functools.partial(getattr(fusedadam, name), **chosen), dtype)
            assert bytes_of(optimizer, param) == count


def formats(cls, param, **group):
    optimizer = cls([param], **group)
    return optimizer.storage_of(optimizer.param_groups[0], param)


@pytest.mark.parametrize(
    ("shape", "why"),
    [((8192,), "2 dimensions"), ((63, 64), "4,096 elements"), ((128, 40), "divisible by 32")],
)
def test_a_parameter_without_blocks_is_kept_exactly(shape, why):
    chosen = formats(AdamW, torch.nn.Parameter(torch.ones(shape, dtype=BF16)), storage="8bit")
    assert chosen.formats == {"param": "bf16_16", "exp_avg": "f32", "exp_avg_sq": "f32"}
    assert all(why in reason for reason in chosen.reasons.values())
    assert {*chosen.reasons} == {"param", "exp_avg", "exp_avg_sq"}


def test_what_is_not_row_major_is_kept_exactly_and_gaps_do_not_count():
    gapped = torch.nn.Parameter(torch.ones(128, 128, dtype=BF16)[:, :64])
    assert formats(AdamW, gapped, storage="8bit").formats["exp_avg"] == "slice8_signed"
    for turned in (torch.ones(128, 64, dtype=BF16).t(), torch.ones(64, 256, dtype=BF16)[:, :128].t()):
        for preset in ("8bit", "16bit"):
            assert formats(AdamW, torch.nn.Parameter(turned), storage=preset).formats["exp_avg"] == "f32"


def test_a_slow_average_gets_more_bits_and_a_dict_that_denies_them_is_refused():
    param = torch.nn.Parameter(torch.ones(64, 64, dtype=BF16))
    chosen = formats(AdamW, param, storage="8bit", betas=(0.995, 0.999))
    assert (chosen.formats["exp_avg"], chosen.formats["exp_avg_sq"]) == ("bf16_stochastic", "slice8")
    assert "drowns" in chosen.reasons["exp_avg"]
    with pytest.raises(ValueError, match=r"beta1 above 0\.99"):
        AdamW([param], storage={"exp_avg": "slice8"}, betas=(0.995, 0.999))


def test_amsgrads_maximum_and_its_average_stay_float32():
    param = torch.nn.Parameter(torch.ones(64, 64, dtype=BF16))
    chosen = formats(AdamW, param, storage="8bit", amsgrad=True)
    assert chosen.formats["exp_avg_sq"] == chosen.formats["max_exp_avg_sq"] == "f32"
    with pytest.raises(ValueError, match=r"only grows; use 'float32', or leave 'exp_avg_sq' out"):
        AdamW([param], storage={"exp_avg_sq": "slice8"}, amsgrad=True)


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        ("4bit", ValueError, "storage='4bit' is unknown; use one of 'exact', '16bit', '8bit', None"),
        (8, TypeError, "storage=8 is a int"),
        ({"exp_avg": "fp8"}, ValueError, "an unknown format; use one of 'float32', 'bf16', 'slice8', 'linear8'"),
        ({"param": "slice8"}, ValueError, r"a format that it cannot have; use one of 'bf16\+16', 'bf16\+8'"),
        ({"exp_avg": "bf16+8"}, ValueError, "a format that it cannot have"),
        ({"ema_params": "bf16+8"}, ValueError, "which AdamW does not keep; it has 'param', 'exp_avg'"),
    ],
)
def test_what_is_refused_is_named_with_what_to_use(value, error, match):
    param = torch.nn.Parameter(torch.ones(64, 64, dtype=BF16))
    with pytest.raises(error, match=match):
        AdamW([param], storage=value)
    optimizer = AdamW([param])
    with pytest.raises(error, match=match):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "storage": value})
    param.grad = torch.ones_like(param)
    optimizer.param_groups[0]["storage"] = value
    with pytest.raises(error, match=match):
        optimizer.step()
    assert not optimizer.state
    assert param.eq(1).all()


def test_two_ways_to_choose_exclude_each_other():
    param = torch.nn.Parameter(torch.ones(64, 64, dtype=BF16))
    with pytest.raises(ValueError, match="exclude each other; leave state_dtype out"):
        AdamW([param], storage="8bit", state_dtype=F32)
    with pytest.raises(ValueError, match="exclude each other; leave ema_dtype out"):
        EmaAdamW([param], storage="8bit", ema_dtype=F32)


def test_float16_has_no_exact_storage():
    param = torch.nn.Parameter(torch.ones(64, 64, dtype=F16))
    with pytest.raises(ValueError, match="needs bfloat16 or float32 parameters"):
        AdamW([param], storage="exact")


def test_float16_is_warned_of_once_at_the_line_that_makes_the_optimizer(monkeypatch):
    monkeypatch.setattr(advice, "_told", set())
    param = torch.nn.Parameter(torch.ones(64, 64, dtype=F16))
    with pytest.warns(UserWarning, match="storage= keeps float16 weights .* small steps are lost") as caught:
        AdamW([param], storage="8bit")
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AdamW([param], storage="16bit")


@pytest.mark.parametrize("change", ["storage", "dtype"])
def test_float16_is_warned_of_at_the_step_that_finds_a_change(change, monkeypatch):
    monkeypatch.setattr(advice, "_told", set())
    layer = torch.nn.Linear(64, 64).to(F16 if change == "storage" else BF16)
    optimizer = AdamW(layer.parameters(), storage=None if change == "storage" else "8bit")
    if change == "storage":
        optimizer.param_groups[0]["storage"] = "8bit"
    else:
        layer.half()
    for param in layer.parameters():
        param.grad = torch.ones_like(param)
    with pytest.warns(UserWarning, match="storage= keeps float16 weights") as caught:
        optimizer.step()
    assert [warning.filename for warning in caught] == [__file__]


def test_float64_stays_float64():
    optimizer, param = stepped(lambda p: AdamW(p, storage="8bit"), F64)
    assert {v.dtype for k, v in optimizer.state[param].items() if k != "step"} == {F64}


def test_groups_may_differ_and_storage_may_change():
    params = [torch.nn.Parameter(torch.ones(64, 64, dtype=BF16)) for _ in range(2)]
    optimizer = AdamW([{"params": params[:1], "storage": "8bit"}, {"params": params[1:], "storage": "16bit"}])
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [("exp_avg_codes" in optimizer.state[p]) for p in params] == [True, False]
    optimizer.param_groups[0]["storage"] = "exact"
    optimizer.step()
    assert optimizer.state[params[0]]["exp_avg"].dtype == F32
    assert optimizer.state[params[0]]["param_low"].dtype == torch.int16
    assert "exp_avg_codes" not in optimizer.state[params[0]]


@pytest.mark.parametrize("cls", [RMSprop, RMSpropTF])
def test_states_that_are_subtracted_stay_float32(cls):
    param = torch.nn.Parameter(torch.ones(64, 64, dtype=BF16))
    for preset in ("8bit", "16bit"):
        chosen = formats(cls, param, storage=preset, centered=True)
        assert (chosen.formats["square_avg"], chosen.formats["grad_avg"]) == ("f32", "f32")
        assert "rounding error" in chosen.reasons["square_avg"]
        assert formats(cls, param, storage=preset).formats["square_avg"] != "f32"
    for role, other in itertools.permutations(("square_avg", "grad_avg")):
        with pytest.raises(ValueError, match=rf"storage\['{role}'\]='bf16' cannot be used with {other}"):
            cls([param], storage={role: "bf16"}, centered=True)
    assert formats(cls, param, storage={"square_avg": "bf16"}).formats["square_avg"] == "bf16_stochastic"


@pytest.mark.parametrize("kept", ["exact", "16bit", "8bit", {"square_avg": "bf16"}, {"square_avg": "slice8"}], ids=str)
@pytest.mark.parametrize("shape", [(64, 128), (5,)], ids=str)
def test_a_state_may_begin_at_one_in_every_format(kept, shape):
    param = torch.nn.Parameter(torch.zeros(shape, dtype=BF16))
    param.grad = torch.zeros(shape, dtype=BF16)
    optimizer = RMSpropTF([param], alpha=1.0, storage=kept)
    optimizer.step()
    assert torch.equal(value_of("square_avg", optimizer.state[param], optimizer.states).float(), torch.ones(shape))


def test_a_checkpoint_that_creates_states_begins_them_at_one():
    """torch.distributed.checkpoint takes a step to have states to load into, which must not count."""
    model = torch.nn.Linear(4, 3)
    optimizer = RMSpropTF(model.parameters(), momentum=0.9)
    state_dict = get_optimizer_state_dict(model, optimizer)
    assert torch.equal(state_dict["state"]["weight"]["square_avg"], torch.ones(3, 4))
    assert float(state_dict["state"]["weight"]["step"]) == 0


def test_a_mapping_that_changes_in_place_is_noticed():
    param = torch.nn.Parameter(torch.ones(64, 64))
    kept = collections.UserDict({"exp_avg": "bf16"})
    optimizer = AdamW([param], storage=kept)
    for wanted, dtype in (("bf16", BF16), ("float32", F32)):
        kept["exp_avg"] = wanted
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert optimizer.state[param]["exp_avg"].dtype == dtype
