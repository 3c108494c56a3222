"""State dicts of other optimizers: training goes on as the original would, or nothing at all is loaded."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import warnings

import adamp
import pytest
import torch

import fusedadam
from fusedadam import ascend
from fusedadam.catalog import CATALOG
from fusedadam.cli.peers import BertAdamLoop
from tests.contract.common import (
    MAKERS,
    assert_same,
    assert_unchanged,
    copies_of,
    everything,
    leaves,
    params_of,
    set_grads,
    tensors,
    train,
)
from tests.meaning.by_hand import AdamByHand, EmaAdamByHand
from tests.support import F64, SAVES_HOW_WEIGHTS_DECAY

OPTIONS = {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1}
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
DONE = 3  # steps that the original has taken when its state dict is saved
SILENT = pytest.mark.filterwarnings("ignore:the state dict has no ema_params", "ignore:NpuFusedBertAdam. b2")


def ours_with(cls, params, given):
    optimizer = cls(params)
    optimizer.load_state_dict(given)
    return optimizer


def without_average(optimizer):
    params, states = tensors(optimizer)
    return params, [{name: value for name, value in state.items() if name != "ema_params"} for state in states]


def goes_on(original, given, cls, **options):
    """Ours, made with other options than those that are loaded, beside the original for some more steps."""
    ours = cls(copies_of(original), lr=0.7, **options)
    before = copy.deepcopy(given)
    ours.load_state_dict(given)
    torch.testing.assert_close(given["state"], before["state"], rtol=0, atol=0)  # what is loaded from is only read
    assert given["param_groups"] == before["param_groups"]
    for optimizer in (original, ours):
        train(optimizer, 3, start=DONE)
    assert_same(tensors(ours)[0], tensors(original)[0], **CLOSE)
    assert all(state["step"] == DONE + 3 for state in ours.state.values())
    return ours


# torch

FLAGS = [{}, {"foreach": True}, {"fused": True}, {"amsgrad": True}, {"amsgrad": True, "fused": True}]
INTO = {
    torch.optim.AdamW: [fusedadam.AdamW, ascend.NpuFusedAdamW, fusedadam.EmaAdamW, ascend.FusedEmaAdamW],
    torch.optim.Adam: [fusedadam.Adam],
}
STEPS = {
    "int": int,
    "float": float,
    "1-d": lambda step: step.reshape(1),
    "float64": lambda step: step.double(),
    "int64": lambda step: step.long(),
}
COMBINATIONS = [
    pytest.param(theirs, cls, flags, step, id=f"{cls.__name__}-{flags}-{step}")
    for theirs, every in INTO.items()
    for cls in every
    for flags, step in [*((f, "as it is") for f in FLAGS), *(({}, s) for s in STEPS)]
    if not (issubclass(cls, fusedadam.EmaAdamW) and "amsgrad" in flags)  # it has none, and refuses it
]


@SILENT
@pytest.mark.parametrize(("theirs", "cls", "flags", "step"), COMBINATIONS)
def test_torchs_goes_on(theirs, cls, flags, step):
    """Steps were ints before torch 1.12, and were saved with a dimension or in other dtypes by others."""
    original = train(theirs(leaves(dtypes=[F64]), **OPTIONS, **flags), DONE)
    given = copy.deepcopy(original.state_dict())
    given["param_groups"][0]["capturable"] = True  # as saved on a GPU
    for state in given["state"].values():
        state["step"] = STEPS.get(step, copy.copy)(state["step"])
    assert_same(without_average(goes_on(original, given, cls)), original, **CLOSE)


def test_a_parameter_that_never_had_a_gradient_has_no_state_and_begins_later():
    original = torch.optim.AdamW(leaves(dtypes=[F64]), **OPTIONS)
    for step in range(DONE):
        set_grads(params_of(original), step)
        params_of(original)[1].grad = None
        original.step()
    ours = fusedadam.AdamW(copies_of(original))
    ours.load_state_dict(copy.deepcopy(original.state_dict()))
    for optimizer in (original, ours):
        train(optimizer, 2, start=DONE)
    assert_same(ours, original, **CLOSE)
    assert ours.state[params_of(ours)[1]]["step"] == 2


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("flags", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("cls", [fusedadam.AdamW, fusedadam.Adam])
def test_ours_goes_on_in_torch(cls, flags, amsgrad):
    ours = train(cls(leaves(dtypes=[F64]), **OPTIONS, amsgrad=amsgrad, **flags), DONE)
    theirs = getattr(torch.optim, cls.__name__)(copies_of(ours), **flags)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    for optimizer in (ours, theirs):
        train(optimizer, 3, start=DONE)
    assert_same(ours, theirs, **CLOSE)


def test_ema_adamw_goes_on_in_torchs_adamw():
    ours = train(fusedadam.EmaAdamW(leaves(dtypes=[F64]), **OPTIONS), DONE)
    theirs = torch.optim.AdamW(copies_of(ours))
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    for optimizer in (ours, theirs):
        train(optimizer, 3, start=DONE)
    assert_same(without_average(ours), without_average(theirs), **CLOSE)


def test_a_momentum_buffer_of_none_has_not_begun():
    """As older versions of torch saved it without momentum. The first step of ours is then the first of all."""
    original = torch.optim.SGD(leaves(dtypes=[F64]), lr=0.05, momentum=0.9, dampening=0.3)
    given = copy.deepcopy(original.state_dict())
    given["state"] = {0: {"momentum_buffer": None}, 1: {"momentum_buffer": torch.ones(7, dtype=F64)}}
    ours = fusedadam.SGD(copies_of(original))
    ours.load_state_dict(given)
    original.load_state_dict(copy.deepcopy(given))
    assert [len(ours.state.get(p, {})) for p in params_of(ours)] == [0, 2, 0, 0]
    for optimizer in (original, ours):
        train(optimizer, 3)
    assert_same(tensors(ours)[0], tensors(original)[0], **CLOSE)


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.0), (0.0, 0.9)])
def test_momentum_that_was_just_switched_is_saved_and_loaded(before, after):
    ours = train(fusedadam.SGD(leaves(), momentum=before), DONE)
    ours.param_groups[0]["momentum"] = after
    other = fusedadam.SGD(copies_of(ours))
    other.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert_same(train(other, 2, start=DONE), train(ours, 2, start=DONE))


def test_a_buffer_that_is_not_used_is_checked_all_the_same():
    given = train(fusedadam.SGD(leaves(), momentum=0.9), DONE).state_dict()
    given["param_groups"][0]["momentum"] = 0.0
    given["state"][0]["momentum_buffer"] = torch.zeros(3)
    with pytest.raises(ValueError, match="is it another model's"):
        fusedadam.SGD(leaves()).load_state_dict(given)


# the adamp package


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("cls", [fusedadam.AdamP, ascend.NpuFusedAdamP])
def test_the_adamp_packages_goes_on(cls, nesterov):
    own = {"delta": 1.0, "wd_ratio": 0.3, "nesterov": nesterov}
    original = train(adamp.AdamP(leaves(dtypes=[F64]), **OPTIONS, **own), DONE)
    ours = goes_on(original, copy.deepcopy(original.state_dict()), cls)
    assert {*ours.projections().values()} > {"none"}, "the test projects nothing"


def test_ours_goes_on_in_the_adamp_package():
    ours = train(fusedadam.AdamP(leaves(dtypes=[F64]), **OPTIONS), DONE)
    theirs = adamp.AdamP(copies_of(ours))
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    for optimizer in (ours, theirs):
        train(optimizer, 3, start=DONE)
    # our count is a tensor of float32, as torch's, and so is what the package calculates from it
    assert_same(tensors(ours)[0], tensors(theirs)[0], rtol=1e-6, atol=1e-7)


# NVIDIA's BertAdam

BERT = {"lr": 0.05, "warmup": 0.25, "t_total": 20, "b1": 0.8, "b2": 0.95, "e": 1e-5, "weight_decay": 0.1}


def nvidias(original):
    """Its names of states and its groups; the count is an int."""
    saved = copy.deepcopy(original.state_dict())
    for group in saved["param_groups"]:
        assert group["max_grad_norm"] == 0.5
        group["schedule"] = "warmup_linear"
    for state in saved["state"].values():
        state["next_m"], state["next_v"] = state.pop("exp_avg"), state.pop("exp_avg_sq")
        assert set(state) == {"step", "next_m", "next_v"}
        assert type(state["step"]) is int
    return saved


@SILENT
@pytest.mark.parametrize("cls", [fusedadam.BertAdam, ascend.NpuFusedBertAdam])
def test_nvidias_bert_adams_goes_on_in_the_middle_of_its_warm_up(cls):
    original = train(BertAdamLoop(leaves(dtypes=[F64]), **BERT, max_grad_norm=0.5), DONE)
    ours = goes_on(original, nvidias(original), cls)
    assert ours.param_groups[0]["b2"] == 0.95
    assert set(ours.state[params_of(ours)[0]]) == {"step", "exp_avg", "exp_avg_sq"}


# MindSpeed and apex, which count by group


def by_group(hands, step, **options):
    """A state dict of optimizers that keep one count a group."""
    names = {"m": "exp_avg", "v": "exp_avg_sq", "s": "ema_params"}
    state = {k: {n: getattr(h, a).clone() for a, n in names.items() if hasattr(h, a)} for k, h in enumerate(hands)}
    return {"state": state, "param_groups": [{"params": [*range(len(hands))], "step": step, **options}]}


class Hands(torch.optim.Optimizer):
    """References by hand, one for each parameter, trained like an optimizer."""

    def __init__(self, make, **options):
        params = leaves(dtypes=[F64])
        super().__init__(params, {})
        self.hands = [make(p.detach().clone(), **options) for p in params]

    @torch.no_grad()
    def step(self):
        for p, hand in zip(params_of(self), self.hands, strict=True):
            hand.step(p.grad)
            p.copy_(hand.p)


COUNTS = pytest.mark.parametrize("count", [DONE, torch.tensor([DONE]), torch.tensor(float(DONE))], ids=repr)
EPS = {"eps": 1e-7, **OPTIONS}


@COUNTS
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("cls", [fusedadam.EmaAdamW, ascend.FusedEmaAdamW])
def test_mindspeeds_goes_on_with_its_average(cls, bias_correction, count):
    """What MindSpeed keeps in its groups: no decay of the average, which the new optimizer is made with."""
    own = {"bias_correction": bias_correction}
    original = train(Hands(EmaAdamByHand, **EPS, **own, ema_decay=0.9, warmup=True), DONE)
    given = by_group(original.hands, count, **EPS, **own, amsgrad=False, maximize=False)
    ours = goes_on(original, given, cls, ema_decay=0.9)
    averages = [state["ema_params"] for state in tensors(ours)[1]]
    torch.testing.assert_close(averages, [hand.s for hand in original.hands], **CLOSE)
    assert "step" not in ours.param_groups[0], "each parameter has its own"


@COUNTS
@pytest.mark.parametrize("decoupled", [True, False])
def test_apexs_goes_on(decoupled, count):
    original = train(Hands(AdamByHand, **EPS, decoupled=decoupled), DONE)
    given = by_group(original.hands, count, **EPS, bias_correction=True)
    ours = goes_on(original, given, fusedadam.AdamW if decoupled else fusedadam.Adam)
    assert "step" not in ours.param_groups[0]


def test_a_groups_count_comes_after_the_parameters_own():
    given = train(fusedadam.AdamW(leaves()), 2).state_dict()
    given["param_groups"][0]["step"] = 17
    assert all(state["step"] == 2 for state in ours_with(fusedadam.AdamW, leaves(), given).state.values())


# what is refused


def other(make, **options):
    def replace(given):
        theirs = train(make(leaves(), **options), 2).state_dict()
        given.update(theirs)

    return replace


def state(name, value):
    def replace(given):
        if value is None:
            del given["state"][1][name]
        else:
            given["state"][1][name] = value

    return replace


def option(name, value):
    return lambda given: given["param_groups"][0].update({name: value})


def states_of_nobody(given):
    given["state"][77] = given["state"][0]


REFUSED = {
    "another shape": (state("exp_avg", torch.zeros(3)), r"state 1: 'exp_avg' has shape \(3,\), but .* \(7,\)"),
    "a broadcastable shape": (state("exp_avg_sq", torch.zeros(1)), r"state 1: 'exp_avg_sq' has shape \(1,\)"),
    "no second moment": (state("exp_avg_sq", None), r"state 1 has no 'exp_avg_sq'"),
    "no step": (state("step", None), r"state 1 has no 'step'"),
    "SGD's": (other(torch.optim.SGD, lr=0.1, momentum=0.9), r"has no .*'exp_avg'.*momentum_buffer.*another optimizer"),
    "RMSprop's": (other(torch.optim.RMSprop), r"has no .*'exp_avg'.*square_avg.*another optimizer"),
    "Adagrad's": (other(torch.optim.Adagrad), r"has no .*'exp_avg'.*sum.*another optimizer"),
    "step -1": (state("step", -1), r"state 1: 'step' is -1.*at least 0"),
    "step -1, a tensor": (state("step", torch.tensor(-1.0)), r"state 1: 'step' is -1.*at least 0"),
    "step 2.5": (state("step", 2.5), r"state 1: 'step' is 2.5.*whole number"),
    "step nan": (state("step", torch.tensor(math.nan)), r"state 1: 'step' is nan.*whole number"),
    "step inf": (state("step", math.inf), r"state 1: 'step' is inf.*whole number"),
    "two steps": (state("step", torch.ones(2)), r"state 1: 'step' has shape \(2,\).*one element"),
    "a step in words": (state("step", "three"), r"state 1: 'step' is a str.*number"),
    "integer moments": (state("exp_avg", torch.zeros(7, dtype=torch.int64)), r"state 1: 'exp_avg' has dtype int64"),
    "complex moments": (state("exp_avg", torch.zeros(7, dtype=torch.complex64)), r"state 1: 'exp_avg' has dtype"),
    "moments that are a list": (state("exp_avg", [0.0] * 7), r"state 1: 'exp_avg' is a list.*torch.Tensor"),
    "sparse moments": (state("exp_avg", torch.zeros(7).to_sparse()), r"state 1: 'exp_avg' has layout sparse"),
    "moments without memory": (state("exp_avg", torch.zeros(7, device="meta")), r"state 1: 'exp_avg' is a meta tensor"),
    "states of nobody": (states_of_nobody, r"states of \[77\], which are in none of its groups"),
    "lr -1": (option("lr", -1.0), r"lr=-1.0 is out of range"),
    "lr nan": (option("lr", math.nan), r"lr=nan is out of range"),
    "a weight decay in words": (option("weight_decay", "much"), r"weight_decay='much' is a str"),
    "differentiable": (option("differentiable", True), r"differentiable=True is not supported"),
}
OF_ADAM = {
    "Adamax's": (other(torch.optim.Adamax), r"has no 'exp_avg_sq'.*exp_inf.*another optimizer"),
    **{
        f"{entry.name}'s": (other(entry.torch_twin), r"mu_product.*another optimizer")
        for entry in CATALOG.values()
        if "mu_product" in entry.cls.states
    },
    "BertAdam's": (other(fusedadam.BertAdam), r"options of another optimizer than .*b1"),
    "one beta": (option("betas", (0.9,)), r"betas=\(0.9,\) must be 2 numbers"),
    "a beta of one": (option("betas", (0.9, 1.0)), r"betas\[1\]=1.0 is out of range"),
    "eps -1": (option("eps", -1.0), r"eps=-1.0 is out of range"),
}
OWN = {
    "AdamW": {
        **OF_ADAM,
        "Adam's": (other(torch.optim.Adam, weight_decay=0.1), r"decoupled_weight_decay=False: .*L2 penalty"),
        "no bias correction": (
            option("bias_correction", False),
            r"bias_correction=False, which AdamW does not support",
        ),
        "nesterov": (option("nesterov", True), r"nesterov=True, which AdamW does not support"),
    },
    "Adam": OF_ADAM,
    "EmaAdamW": {
        **OF_ADAM,
        "ema_decay 2": (option("ema_decay", 2.0), r"ema_decay=2.0 is out of range"),
        "amsgrad": (option("amsgrad", True), r"amsgrad=True, which EmaAdamW does not support"),
        "an average of another shape": (state("ema_params", torch.zeros(3)), r"state 1: 'ema_params' has shape"),
    },
    "AdamP": {**OF_ADAM, "delta -1": (option("delta", -1.0), r"delta=-1.0 is out of range")},
    "BertAdam": {
        "AdamW's": (other(torch.optim.AdamW), r"options of another optimizer than .*betas"),
        "b2 1": (option("b2", 1.0), r"b2=1.0 is out of range"),
        "t_total 0": (option("t_total", 0), r"t_total=0 is out of range"),
        "an unknown schedule": (option("schedule", "warmup_sideways"), r"schedule='warmup_sideways' is unknown"),
    },
}
BAD = [
    pytest.param(MAKERS[name], *bad, id=f"{name}-{kind}")
    for name, own in OWN.items()
    for kind, bad in {**REFUSED, **own}.items()
    if SAVES_HOW_WEIGHTS_DECAY or "decoupled_weight_decay" not in bad[1]
]


@SILENT
@pytest.mark.filterwarnings("ignore:.*quantiz.*")
@pytest.mark.parametrize(("make", "damage", "says"), BAD)
def test_what_does_not_fit_is_refused_in_words_and_nothing_is_loaded(make, damage, says):
    """Everything is looked at first: a dict whose last state is bad must not leave the others' behind."""
    given = copy.deepcopy(train(make(leaves(seed=3)), 5).state_dict())
    damage(given)
    optimizer, untroubled = train(make(leaves()), 2), train(make(leaves()), 2)
    before, seen = everything(optimizer), copy.deepcopy(given)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=says):
        optimizer.load_state_dict(given)
    assert_unchanged(optimizer, before)
    assert str(given) == str(seen)
    for one in (optimizer, untroubled):
        train(one, 2, start=2)
    assert_same(optimizer, untroubled)


def test_a_running_maximum_that_was_not_kept_begins_at_zero():
    """As where amsgrad is switched on between steps; torch fails for want of it."""
    given = copy.deepcopy(train(fusedadam.AdamW(leaves(), **OPTIONS), 2).state_dict())
    del given["param_groups"][0]["amsgrad"]
    ours = fusedadam.AdamW(leaves(), amsgrad=True)
    ours.load_state_dict(given)
    train(ours, 1, start=2)
    assert all(torch.equal(state["max_exp_avg_sq"], state["exp_avg_sq"]) for state in ours.state.values())


def test_nvidias_names_are_nobody_elses():
    """They are translated for BertAdam alone."""
    given = nvidias(train(BertAdamLoop(leaves(), **BERT, max_grad_norm=0.5), 2))
    for name in ("b1", "b2"):
        del given["param_groups"][0][name]
    with pytest.raises(ValueError, match=r"has no 'exp_avg', 'exp_avg_sq'.*next_m, next_v"):
        fusedadam.AdamW(leaves()).load_state_dict(given)


# the average of EmaAdamW


@pytest.mark.parametrize("cls", [fusedadam.EmaAdamW, ascend.FusedEmaAdamW])
def test_a_state_dict_without_the_average_is_noted_where_it_is_loaded_and_the_average_begins(cls):
    original = train(torch.optim.AdamW(leaves()), 2)
    ours = cls(leaves(seed=1), lr=0.0, weight_decay=0.0)
    given = original.state_dict()
    given["param_groups"][0].update(lr=0.0, weight_decay=0.0)
    with pytest.warns(UserWarning, match="no ema_params, which .* keeps: it begins at the next step") as notes:
        ours.load_state_dict(given)
    assert [note.filename for note in notes] == [__file__]
    train(ours, 1)
    for p in params_of(ours):
        torch.testing.assert_close(ours.state[p]["ema_params"], p.detach())


@pytest.mark.parametrize("make", [fusedadam.EmaAdamW, functools.partial(fusedadam.EmaAdamW, ema_dtype=F64)])
def test_a_state_dict_with_the_average_is_not_noted(make):
    given = train(make(leaves()), 2).state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(leaves()).load_state_dict(given)


def test_averages_that_are_there_stay_where_some_are_missing():
    given = copy.deepcopy(train(fusedadam.EmaAdamW(leaves()), 2).state_dict())
    del given["state"][1]["ema_params"]
    optimizer = fusedadam.EmaAdamW(leaves())
    with pytest.warns(UserWarning, match="no ema_params"):
        optimizer.load_state_dict(given)
    states = tensors(optimizer)[1]
    assert [("ema_params" in state) for state in states] == [True, False, True, True]
    assert torch.equal(states[0]["ema_params"], given["state"][0]["ema_params"])


# they keep the same states and compute with them differently
LAMBS = itertools.permutations((fusedadam.Lamb, ascend.NpuFusedLamb, fusedadam.AdamW), 2)
TOLD_APART = [(*pair, r"options of another optimizer|which .* does not support") for pair in LAMBS]
RMSPROPS = itertools.permutations((fusedadam.RMSprop, fusedadam.RMSpropTF))
TOLD_APART += [(*pair, "options of another optimizer") for pair in RMSPROPS]
# without momentum SGD keeps nothing that could be missing, and only a warning said that the moments were lost
SGDS = fusedadam.SGD, functools.partial(fusedadam.SGD, momentum=0.9)
TOLD_APART += [(fusedadam.AdamW, sgd, "another optimizer") for sgd in SGDS]


@pytest.mark.parametrize(("saved", "loading", "says"), TOLD_APART)
def test_optimizers_that_could_be_confused_are_told_apart(saved, loading, says):
    given = train(saved(leaves()), DONE).state_dict()
    optimizer = train(loading(leaves()), 1)
    before = everything(optimizer)
    with pytest.raises(ValueError, match=says):
        optimizer.load_state_dict(given)
    assert_unchanged(optimizer, before)
    saved(leaves()).load_state_dict(given)
