"""torch's other wrappers for several devices: DDP, ZeRO (its steps: test_storage.py), FSDP1; stepping in backward."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import fusedadam
from tests.distributed.parts import digest, fully_shard, here, mesh_of
from tests.distributed.reference import ELEMENTWISE, MULTIPLYING, OPTIMIZERS, SUMMING
from tests.distributed.test_backward import STEPS, batch, learn, loss_of, make, mine, model, sharded, train
from tests.distributed.test_backward import assert_same as assert_same_as_alone
from tests.distributed.world import on

EVERY = pytest.mark.parametrize("optimizer", OPTIMIZERS)
OVER_SEVERAL = [name for name in SUMMING if name not in ("AdamP", "BertAdam")]
EVERY_ELEMENTWISE = pytest.mark.parametrize("optimizer", ELEMENTWISE)
EVERY_SUMMING = pytest.mark.parametrize("optimizer", SUMMING)


@on("two")
@EVERY
def test_ddp(optimizer):
    net = DistributedDataParallel(model())
    assert_same_as_alone(train(net, optimizer, mine), train(model(), optimizer))
    return digest(net.parameters())


def zero_of(optimizer: str, net: nn.Module) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which takes long to import

    made = OPTIMIZERS[optimizer]
    return ZeroRedundancyOptimizer(net.parameters(), optimizer_class=made.func, **made.keywords)


@on("two")
@pytest.mark.parametrize("optimizer", OVER_SEVERAL)
def test_zero_refuses_norms_over_several(optimizer):
    with pytest.raises(ValueError, match=r"gives each process some of the parameters.*leave max_grad_norm out"):
        zero_of(optimizer, model())


@on("two")
def test_zero_refuses_norms_that_are_asked_for_later():
    """An option that is set after the optimizer was made."""
    net = model()
    zero = zero_of("AdamW", net)
    learn(net, zero, batch(0))
    for group in zero.param_groups:
        group["max_grad_norm"] = 1.0
    with pytest.raises(ValueError, match="ZeroRedundancyOptimizer"):
        zero.step()


@on("two")
def test_zero_refuses_norms_of_a_group_that_is_added_later():
    """ZeRO takes a group in before its local optimizer sees it: refusing it there would leave the two different."""
    net = model()
    zero = zero_of("AdamW", net)
    learn(net, zero, batch(0))
    added = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]  # one for each process
    for p in added:
        p.grad = torch.ones_like(p)
    zero.add_param_group({"params": added, "max_grad_norm": 1.0})
    assert len(zero.param_groups) == len(zero.optim.param_groups) == 2
    with pytest.raises(ValueError, match="ZeroRedundancyOptimizer gives each process"):
        zero.step()
    zero.param_groups[1]["max_grad_norm"] = None
    zero.step()


def fsdp1(original: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a GPU would be faster
        return FullyShardedDataParallel(model(), use_orig_params=original, device_id=torch.device("cpu"))


ORIGINAL = pytest.mark.parametrize("original", [False, True], ids=["flat parameters", "use_orig_params"])


@on("two")
@ORIGINAL
@EVERY_ELEMENTWISE
def test_fsdp1(optimizer, original):
    alone = train(model(), optimizer)
    net = fsdp1(original)
    train(net, optimizer, mine)
    with FullyShardedDataParallel.summon_full_params(net):
        trained = [p.detach().clone() for p in net.module.parameters()]
        if not original:
            trained = [t.view(a.shape) for t, a in zip(trained, alone[0], strict=True)]
        torch.testing.assert_close(trained, alone[0], rtol=0, atol=1e-6)


@on("two")
@ORIGINAL
@pytest.mark.parametrize("optimizer", SUMMING | MULTIPLYING)
def test_fsdp1_refuses_rules_that_sum_or_multiply(optimizer, original):
    with pytest.raises(ValueError, match=r"FullyShardedDataParallel has flattened.*fully_shard \(FSDP2\) instead"):
        make(optimizer, fsdp1(original).parameters())


@on("two")
def test_fsdp1_refuses_norms_that_are_asked_for_later():
    net = fsdp1(True)
    opt = fusedadam.AdamW(net.parameters())
    loss_of(net(mine(0)), mine(0)).backward()
    opt.param_groups[0]["max_grad_norm"] = 1.0
    with pytest.raises(ValueError, match="FullyShardedDataParallel has flattened"):
        opt.step()
    opt.param_groups[0]["max_grad_norm"] = None
    opt.step()


@on("two")
@ORIGINAL
def test_fsdp1_refuses_what_would_be_wrong(original):
    """What would be silently wrong: averages that do not reach the model, the norm of a part, gradients too early."""
    net = fsdp1(original)
    opt = make("EmaAdamW", net.parameters())
    loss_of(net(mine(0)), mine(0)).backward()
    with pytest.raises(
        RuntimeError, match=r"each process has only some of the gradients.*the model's own clip_grad_norm_"
    ):
        fusedadam.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    averages = "FullyShardedDataParallel keeps weights that it has gathered"
    with pytest.raises(RuntimeError, match=averages), opt.ema_weights():
        pass
    with pytest.raises(RuntimeError, match=averages):
        opt.ema_state_dict(net)
    with pytest.raises(TypeError, match="adds up after they would have been used here"):
        fusedadam.step_in_backward(net, functools.partial(make, "AdamW"))
    learn(net, opt, mine(1))  # and nothing is left behind


@on("two")
def test_zero_refuses_to_evaluate_with_averages():
    net = model()
    zero = zero_of("EmaAdamW", net)
    learn(net, zero, batch(0))
    with pytest.raises(RuntimeError, match="only some of the averages"), zero.optim.ema_weights():
        pass
    with pytest.raises(RuntimeError, match="only some of the averages"):
        zero.optim.ema_state_dict(net)


@on("two")
@EVERY_ELEMENTWISE
def test_step_in_backward_under_fsdp2(optimizer):
    """The bits of the same training with step() after backward."""
    ends = []
    for early in (False, True):
        net = sharded()
        make_it = functools.partial(make, optimizer)
        opt = fusedadam.step_in_backward(net, make_it) if early else make_it(net.parameters())
        for step in range(STEPS):
            opt.zero_grad()
            loss_of(net(mine(step)), mine(step)).backward()
            assert all(p.grad is None for p in net.parameters()) == early
            opt.step()
        states = [v for p in net.parameters() for v in opt.state[p].values()]
        ends.append([here(t).clone() for t in (*net.parameters(), *states)])
    torch.testing.assert_close(*ends, rtol=0, atol=0)


@on("two")
@pytest.mark.parametrize("optimizer", SUMMING | MULTIPLYING)
def test_step_in_backward_refuses_rules_that_sum_or_multiply(optimizer):
    net = model()
    fully_shard(net, mesh=mesh_of(2))
    with pytest.raises(
        ValueError, match=r"stepping in backward (would wait for|sees one gradient|takes one parameter)"
    ):
        fusedadam.step_in_backward(net, functools.partial(make, optimizer))
    # and nothing is left behind: the model can be trained
    learn(net, make(optimizer, net.parameters()), mine(0))


@on("two")
def test_step_in_backward_refuses_ddp():
    """It adds gradients up after they are complete here: every rank would train by itself."""
    net = DistributedDataParallel(model())
    with pytest.raises(TypeError, match=r"DistributedDataParallel.*optimizer.step\(\)"):
        fusedadam.step_in_backward(net, functools.partial(make, "AdamW"))
    loss_of(net(mine(0)), mine(0)).backward()
    assert all(p.grad is not None for p in net.parameters())
