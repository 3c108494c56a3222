"""EmaAdamW puts its averages into the model and into state dicts; every average finds its place, or it raises."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fusedadam
from tests.contract.common import Small, batch, tensors, train
from tests.support import F64


def trained(model):
    optimizer = fusedadam.EmaAdamW(model.parameters(), lr=0.1, ema_decay=0.5)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)).backward()
        optimizer.step()
    return optimizer


def assert_averaged(model, optimizer, state):
    """The state dict is the one that the model has while the averages are in it."""
    with optimizer.ema_weights():
        expected = copy.deepcopy(model.state_dict())
    assert list(state) == list(expected)
    torch.testing.assert_close(state, expected, rtol=0, atol=0)
    for value in state.values():
        assert all(value.data_ptr() != p.data_ptr() for p in model.parameters()), "it is a copy"


def wrapped_in_part(model):
    model.last = checkpoint_wrapper(model.last)
    return model


def renaming(model):
    def rename(module, state_dict, prefix, metadata):
        for key in list(state_dict):
            state_dict[f"renamed.{key}"] = state_dict.pop(key)

    model._register_state_dict_hook(rename)
    return model


def detaching(model):
    def detach(module, state_dict, prefix, metadata):
        state_dict.update({key: value.detach() for key, value in state_dict.items()})

    model.register_state_dict_post_hook(detach)
    return model


def compiled(model):
    return torch.compile(model, backend="eager")


def parametrized(model):
    torch.nn.utils.parametrizations.weight_norm(model.last)
    return model


@pytest.mark.parametrize("change", [wrapped_in_part, renaming, detaching, parametrized, compiled, lambda model: model])
def test_every_average_is_placed_whatever_entries_are_called(change):
    model = change(Small())
    optimizer = trained(model)
    assert_averaged(model, optimizer, optimizer.ema_state_dict(model))


def test_a_copy_of_the_model_is_refused():
    model = Small()
    optimizer = trained(model)
    with pytest.raises(ValueError, match="model has none of this optimizer's parameters"):
        optimizer.ema_state_dict(copy.deepcopy(model))
    with pytest.raises(ValueError, match="none of this optimizer's parameters"):
        fusedadam.EmaAdamW(model.parameters()).ema_state_dict(copy.deepcopy(model))


@pytest.mark.parametrize(
    "hook",
    [
        lambda state: state.pop("last.weight"),
        lambda state: state.update({"last.weight": state["last.weight"].clone()}),
        lambda state: state.update({"last.weight": state["last.weight"].half()}),
        lambda state: state.update({"last.weight": state["last.weight"][:2], "rest": state["last.weight"][2:]}),
    ],
    ids=["dropped", "copied", "converted", "divided"],
)
def test_an_average_without_a_place_is_named(hook):
    model = Small()
    optimizer = trained(model)
    model._register_state_dict_hook(lambda module, state, prefix, metadata: [hook(state)].clear())
    with pytest.raises(RuntimeError, match=r"averages of last.weight have no place.*use ema_weights\(\)"):
        optimizer.ema_state_dict(model)


def test_a_part_of_the_model_and_frozen_weights():
    model = Small()
    model.norm.requires_grad_(False)
    optimizer = trained(model)
    assert_averaged(model, optimizer, optimizer.ema_state_dict(model))
    part = optimizer.ema_state_dict(model.last)
    assert torch.equal(part["weight"], optimizer.state[model.last.weight]["ema_params"])


def test_before_the_first_step_the_average_is_the_weights():
    model = Small()
    optimizer = fusedadam.EmaAdamW(model.parameters())
    torch.testing.assert_close(optimizer.ema_state_dict(model), model.state_dict(), rtol=0, atol=0)


def test_buffers_that_have_no_memory_of_their_own():
    model = Small()
    model.register_buffer("adjacency", torch.eye(3).to_sparse())
    optimizer = trained(model)
    state = optimizer.ema_state_dict(model)
    assert torch.equal(state["adjacency"].to_dense(), torch.eye(3))
    assert torch.equal(state["last.weight"], optimizer.state[model.last.weight]["ema_params"])


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_ema_adamw_refuses_what_it_does_not_do(option):
    with pytest.raises(ValueError, match=option):
        fusedadam.EmaAdamW([{"params": [torch.nn.Parameter(torch.ones(1))], option: True}])


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))

    def get_extra_state(self):
        return {"vocabulary": ["a", "b"]}

    def set_extra_state(self, state):
        assert state == self.get_extra_state()


def trained_model(**options):
    torch.manual_seed(0)
    model = Tied()
    optimizer = fusedadam.EmaAdamW(model.parameters(), lr=0.1, **options)
    train(optimizer, 3)
    return model, optimizer


@pytest.mark.parametrize("dtype", [None, F64])
def test_ema_weights_are_in_the_model_inside_and_gone_after_whatever_happens(dtype):
    model, optimizer = trained_model(ema_dtype=dtype)
    model.norm.bias.data[0] = float("nan")
    before = copy.deepcopy(tensors(optimizer))

    def attempt():
        with optimizer.ema_weights():
            for p in model.parameters():
                assert torch.equal(p, optimizer.state[p]["ema_params"].to(p.dtype))
            with optimizer.ema_weights():
                pass
            with pytest.raises(RuntimeError, match="ema_weights"):
                optimizer.step()
            raise KeyError("evaluation failed")

    with pytest.raises(KeyError):
        attempt()
    torch.testing.assert_close(tensors(optimizer), before, rtol=0, atol=0, equal_nan=True)
    train(optimizer, 1)


def test_ema_state_dict_is_the_models_with_the_average_in_it():
    """Tied weights stay tied, entries that are no tensors and the modules' versions survive, nothing is shared."""
    model, optimizer = trained_model(ema_dtype=F64)
    plain, averaged = model.state_dict(), optimizer.ema_state_dict(model)
    assert list(averaged) == list(plain)
    assert averaged["first.weight"] is averaged["last.weight"]
    assert averaged["_extra_state"] == plain["_extra_state"]
    assert averaged._metadata == plain._metadata
    for name, p in model.named_parameters():
        torch.testing.assert_close(averaged[name], optimizer.state[p]["ema_params"].to(p.dtype), rtol=0, atol=0)
        assert not averaged[name].requires_grad
    held = [value for value in averaged.values() if isinstance(value, torch.Tensor)]
    frozen = copy.deepcopy(held)
    train(optimizer, 2)
    model.norm.running_mean += 1
    torch.testing.assert_close(held, frozen, rtol=0, atol=0)
    Tied().load_state_dict(averaged)
