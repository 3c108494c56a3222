"""EmaAdamW's averages of sharded models: each process keeps its shard, and evaluates with the whole average."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fusedadam import compat
from tests.distributed.follow import assert_states_lie_like
from tests.distributed.parts import digest, fully_shard, mesh_of, whole
from tests.distributed.test_backward import Block, batch, learn, make, mine, model, sharded
from tests.distributed.world import NEEDS_FSDP2_ON_CPU, on

NEAR = {"rtol": 0, "atol": 1e-6}


def train(net: nn.Module, opt: Any, steps: range = range(3)) -> None:
    """Each process has its share of the batch, if the model is divided."""
    is_divided = any(isinstance(p, DTensor) for p in net.parameters())
    for step in steps:
        learn(net, opt, mine(step) if is_divided else batch(step))


def evaluate(reshard: bool | None) -> None:
    """Whatever a forward pass has gathered and kept: it is the averages' inside, and the weights' outside."""
    net, alone = sharded(reshard_after_forward=reshard), model()
    opt, single = make("EmaAdamW", net.parameters()), make("EmaAdamW", alone.parameters())
    train(net, opt)
    train(alone, single)
    params = list(net.parameters())
    for p in params:
        assert_states_lie_like(p, opt.state[p])
    x = batch(9)
    with torch.no_grad():
        before, trained = digest(params), net(x)
        torch.testing.assert_close(trained, alone(x), **NEAR)
        with opt.ema_weights(), single.ema_weights():
            averaged = net(x)
            torch.testing.assert_close(averaged, alone(x), **NEAR)
            assert (averaged - trained).abs().max() > 1e-3, "the averages are not to be told from the weights"
            with pytest.raises(RuntimeError, match="a step inside ema_weights"):
                opt.step()
            assert torch.equal(net(x), averaged)
        assert digest(params) == before
        assert torch.equal(net(x), trained)
        with pytest.raises(ZeroDivisionError), opt.ema_weights():
            raise ZeroDivisionError
        assert torch.equal(net(x), trained)
    train(net, opt, range(3, 5))
    train(alone, single, range(3, 5))
    torch.testing.assert_close([whole(p.detach()) for p in net.parameters()], [*alone.parameters()], **NEAR)


@NEEDS_FSDP2_ON_CPU
@pytest.mark.parametrize("reshard", [None, True, False])
def test_evaluation_with_averages_under_fsdp2(two, reshard):
    two.run(evaluate, reshard)


@NEEDS_FSDP2_ON_CPU
def test_evaluation_with_averages_under_fsdp2_on_three(three):
    three.run(evaluate, None)


@on("two")
def test_state_dicts_of_averages_under_fsdp2():
    net, alone = sharded(), model()
    for one in (net, alone):
        one.register_buffer("seen", torch.arange(3.0))
    opt, single = make("EmaAdamW", net.parameters()), make("EmaAdamW", alone.parameters())
    train(net, opt)
    train(alone, single)
    before, params = digest(net.parameters()), dict(net.named_parameters())
    with torch.no_grad():
        net(batch(0))  # after which the outermost module keeps what it has gathered
    mine, expected = opt.ema_state_dict(net), single.ema_state_dict(alone)
    assert list(mine) == list(expected)
    for name, value in mine.items():
        torch.testing.assert_close(whole(value), expected[name].detach(), **NEAR)
        if name in params:
            assert_states_lie_like(params[name], {name: value})
            assert not torch.equal(whole(value), whole(params[name].detach()))
    other = sharded()
    other.register_buffer("seen", torch.zeros(3))
    other.load_state_dict(mine)
    with torch.no_grad(), single.ema_weights():
        torch.testing.assert_close(other(batch(5)), alone(batch(5)), **NEAR)
    for value in mine.values():
        value.detach().zero_()
    assert digest(params.values()) == before, "a copy was promised"
    assert all(whole(opt.state[p]["ema_params"]).any() for p in params.values())


@on("two")
def test_averages_with_tensor_parallel():
    net, alone, mesh = Block(), Block(), mesh_of(2)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(net, mesh, plan)  # type: ignore[arg-type]
    opt, single = make("EmaAdamW", net.parameters()), make("EmaAdamW", alone.parameters())
    for step in range(3):  # the whole batch everywhere: norms, which are not divided, see the same
        for one, own in ((net, opt), (alone, single)):
            learn(one, own, batch(step))
    with torch.no_grad(), opt.ema_weights(), single.ema_weights():
        torch.testing.assert_close(net(batch(7)), alone(batch(7)), **NEAR)
    found, expected = opt.ema_state_dict(net), single.ema_state_dict(alone)
    for name, value in expected.items():
        torch.testing.assert_close(whole(found[name]), value, **NEAR)
    assert found["up.weight"].placements == (Shard(0),)
    assert found["down.weight"].placements == (Shard(1),)


@on("two")
def test_tied_weights():
    """Weights that two modules share stay one tensor."""
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    fully_shard(net, mesh=mesh_of(2))
    opt = make("EmaAdamW", net.parameters())
    for p in net.parameters():
        p.grad = compat.distribute(torch.ones(4, 4), mesh_of(2), [Shard(0)])
    opt.step()
    mine = opt.ema_state_dict(net)
    assert mine["0.weight"] is mine["1.weight"]
