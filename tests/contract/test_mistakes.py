"""Common mistakes: the error says in one plain sentence what was passed and what is expected."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import fusedadam
from fusedadam import ascend
from tests.contract.common import EVERY, EVERY_PLAIN, Small, assert_same, batch, leaves, set_grads, train
from tests.support import SAVES_HOW_WEIGHTS_DECAY


@EVERY_PLAIN
@pytest.mark.parametrize("make_model", [Small, lambda: torch.nn.Sequential(torch.nn.Linear(2, 2))])
def test_a_module_instead_of_its_parameters(make, make_model):
    model = make_model()
    for given in (model, [{"params": model}]):
        with pytest.raises(TypeError, match=r"params is a module \(\w+\); pass its parameters: model.parameters\(\)"):
            make(given)
    optimizer = make(leaves())
    with pytest.raises(TypeError, match="params is a module"):
        optimizer.add_param_group({"params": model})
    assert len(optimizer.param_groups) == 1


GIVEN = [None, 3, "params", b"params", object()]
NO_PARAMETERS = [(given, rf"a {type(given).__name__}; it must be parameters") for given in GIVEN]
NO_PARAMETERS += [
    (Small(), r"a module \(Small\); pass its parameters"),
    (fusedadam.AdamW(leaves()), r"an optimizer \(AdamW\); pass the parameters"),
]


@pytest.mark.parametrize(("given", "says"), NO_PARAMETERS)
def test_something_else_instead_of_parameters(given, says):
    with pytest.raises(TypeError, match=f"params is {says}"):
        fusedadam.AdamW(given)
    with pytest.raises(TypeError, match=f"parameters is {says}"):
        fusedadam.clip_grad_norm_(given, 1.0)


def classes(module):
    found = [getattr(module, name) for name in module.__all__]
    return [
        c for c in found
        if isinstance(c, type) and issubclass(c, fusedadam.FusedOptimizer) and c is not fusedadam.FusedOptimizer
    ]  # fmt: skip


@pytest.mark.parametrize("cls", [*classes(fusedadam), *classes(ascend), *classes(ascend.mindspeed)])
def test_options_are_checked_before_parameters_as_in_torch(cls):
    """Programs, and torch's own tests, try options out without parameters. An iterator is left to be used again."""
    params = iter(leaves())
    for given in (None, params):
        with pytest.raises(ValueError, match=r"^weight_decay=-1 is out of range"):
            cls(given, lr=0.1, weight_decay=-1)
    assert len(list(params)) == 4


def test_clipping_things_that_are_no_tensors():
    with pytest.raises(TypeError, match=r"parameters\[1\] is a Small; it must be a parameter"):
        fusedadam.clip_grad_norm_([torch.nn.Parameter(torch.ones(1)), Small()], 1.0)


def test_stepping_in_backward_with_an_optimizer_that_is_made():
    model = Small()
    with pytest.raises(TypeError, match=r"make_optimizer is a AdamW; it must be a function .* lambda params"):
        fusedadam.step_in_backward(model, fusedadam.AdamW(model.parameters()))
    with pytest.raises(TypeError, match=r"model is a list; it must be a torch.nn.Module"):
        fusedadam.step_in_backward(list(model.parameters()), fusedadam.AdamW)
    model(batch(0)).backward()
    assert all(p.grad is not None for p in model.parameters()), "a refused one has left hooks behind"


def test_something_else_instead_of_a_state_dict(tmp_path):
    model = Small()
    optimizer = train(fusedadam.AdamW(model.parameters()), 1)
    before = copy.deepcopy(optimizer.state_dict())
    checkpoint = {"epoch": 3, "model": model.state_dict(), "optim": optimizer.state_dict()}
    for given, words in {
        "checkpoint.pt": "state_dict is a str; it must be what optimizer.state_dict.* torch.load first",
        tmp_path: "state_dict is a PosixPath",
        None: "state_dict is a NoneType",
    }.items():
        with pytest.raises(TypeError, match=words):
            optimizer.load_state_dict(given)
    for given, words in (
        (checkpoint, r"whole checkpoint.*under 'optim'; load that: state_dict\['optim'\]"),
        (model.state_dict(), "state dict of a model, all tensors; load it with model.load_state_dict"),
        ({"epoch": 3}, "state_dict has 'epoch' where an optimizer's has 'state' and 'param_groups'"),
        ({}, "state_dict has nothing where"),
    ):
        with pytest.raises(ValueError, match=words):
            optimizer.load_state_dict(given)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    optimizer.load_state_dict(checkpoint["optim"])


def test_a_refused_state_dict_leaves_the_last_step_as_it_was():
    optimizer = train(fusedadam.AdamW(leaves(), max_grad_norm=1.0), 1)
    norm = optimizer.grad_norm
    with pytest.raises(ValueError, match="state_dict has 'a'"):
        optimizer.load_state_dict({"a": 1})
    assert torch.equal(optimizer.grad_norm, norm)


def test_a_state_dict_for_lazy_parameters():
    saved = train(fusedadam.AdamW([torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(3))]), 1)
    model = torch.nn.LazyLinear(3)
    optimizer = fusedadam.AdamW(model.parameters())
    with pytest.raises(ValueError, match="lazy and has no shape yet; run a forward pass first"):
        optimizer.load_state_dict(saved.state_dict())
    model(torch.ones(1, 2))
    optimizer.load_state_dict(saved.state_dict())


def test_adam_with_weight_decay_loaded_into_adamw():
    theirs = torch.optim.Adam(leaves(), weight_decay=0.1)
    set_grads(theirs.param_groups[0]["params"], 0)
    theirs.step()
    saved, ours = theirs.state_dict(), fusedadam.AdamW(leaves())
    if not SAVES_HOW_WEIGHTS_DECAY:
        pytest.skip(f"Adam of torch {torch.__version__} does not save how weights decay")
    with pytest.raises(
        ValueError,
        match=r"its weight decay is an L2 penalty, as Adam's, and AdamW's is decoupled.*load it into Adam, or",
    ):
        ours.load_state_dict(saved)
    fusedadam.Adam(leaves()).load_state_dict(saved)
    for group in saved["param_groups"]:
        del group["decoupled_weight_decay"]
    ours.load_state_dict(saved)  # as the message says


def test_states_that_an_optimizer_does_not_keep_are_left_out():
    """They stayed in memory, and in every checkpoint, for ever."""
    saved = train(fusedadam.EmaAdamW(leaves()), 2).state_dict()
    ours = fusedadam.AdamW(leaves())
    with pytest.warns(UserWarning, match="has ema_params, which AdamW does not keep: it is left out") as caught:
        ours.load_state_dict(saved)
    assert caught[0].filename == __file__
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in ours.state.values())
    assert "ema_params" not in repr(ours.state_dict()["state"])
    assert "ema_params" in saved["state"][0], "the state dict is the caller's"


def test_a_running_maximum_is_kept_for_when_amsgrad_is_switched_on_again():
    ours = train(fusedadam.AdamW(leaves(), amsgrad=True), 2)
    ours.param_groups[0]["amsgrad"] = False
    other = fusedadam.AdamW(leaves())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(ours.state_dict())
    assert all("max_exp_avg_sq" in state for state in other.state.values())


# state-dict hooks


@EVERY
def test_a_hook_that_returns_another_structure(make):
    """Our own keys are in the state dict that the user's hooks see, whatever they return."""
    optimizer = train(make(leaves()), 1)
    plain, seen = optimizer.state_dict(), []

    def wrap(optimizer, state_dict):
        seen.append(copy.deepcopy(state_dict))
        return {"wrapped": state_dict}

    optimizer.register_state_dict_post_hook(wrap)
    assert set(optimizer.state_dict()) == {"wrapped"}
    assert repr(seen[0]) == repr(plain)
    assert ("decoupled_weight_decay" in seen[0]["param_groups"][0]) == ("decoupled" in optimizer.rule.flags)
    optimizer.register_load_state_dict_pre_hook(lambda optimizer, state_dict: state_dict["wrapped"])
    optimizer.load_state_dict(optimizer.state_dict())
    other = train(make(leaves()), 1)
    assert_same(train(optimizer, 2, start=1), train(other, 2, start=1))


def test_state_dict_leaves_no_hook_behind():
    optimizer = train(fusedadam.AdamW(leaves()), 1)
    hooks = len(optimizer._optimizer_state_dict_post_hooks)
    optimizer.state_dict()
    optimizer.register_state_dict_post_hook(lambda optimizer, state_dict: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.state_dict()
    assert len(optimizer._optimizer_state_dict_post_hooks) == hooks + 1


# parameters that a first forward pass makes


@EVERY
def test_lazy_modules_train_as_with_torch(make):
    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.LazyLinear(3), torch.nn.ReLU(), torch.nn.LazyLinear(2), torch.nn.Linear(2, 1)
        )

    def trained(net, optimizer):
        for step in range(3):
            optimizer.zero_grad()
            net(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in net.parameters()]

    lazy, whole = model(), model()
    optimizer = make(lazy.parameters())
    optimizer.step()  # nothing has a gradient yet
    repr(optimizer)
    assert "not yet initialized" in optimizer.memory_summary()
    optimizer.state_dict()
    torch.manual_seed(1)
    lazy(torch.zeros(1, 5))
    torch.manual_seed(1)
    whole(torch.zeros(1, 5))
    torch.testing.assert_close(trained(lazy, optimizer), trained(whole, make(whole.parameters())), rtol=0, atol=0)


def test_lazy_modules_step_in_backward_once_they_are_made():
    model = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(3, 1))
    with pytest.raises(
        TypeError, match="model has lazy parameters, which its first forward pass makes; run one before"
    ):
        fusedadam.step_in_backward(model, fusedadam.AdamW)
    model(torch.ones(4, 5))
    optimizer = fusedadam.step_in_backward(model, fusedadam.AdamW)
    model(torch.ones(4, 5)).square().mean().backward()
    assert optimizer.state[model[0].weight]["step"] == 1
