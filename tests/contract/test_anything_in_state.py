"""Users and hooks may put anything into ``optimizer.state``, as torch's own tests do; every method leaves it alone."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import fusedadam
from tests.contract.common import EVERY, assert_same, copies_of, leaves, params_of, saved_and_loaded, set_grads, train
from tests.support import BF16

THEIRS = {
    "test": 1,
    "notes": {"step": "none", "loss_low": [1.0]},
    "tensor": torch.ones(2),
    ("a", 1): None,
    -5: "five",
    "nested": {"param_low": torch.ones(2, 2, dtype=torch.int16), "exp_avg_codes": 3},
}


def with_theirs(optimizer):
    optimizer.state.update(THEIRS)
    return optimizer


def assert_has_theirs(state):
    found = {key: value for key, value in state.items() if key in THEIRS}
    assert found.keys() == THEIRS.keys()
    torch.testing.assert_close(found["tensor"], THEIRS["tensor"])
    torch.testing.assert_close(found["nested"]["param_low"], THEIRS["nested"]["param_low"])
    assert all(found[key] == THEIRS[key] for key in THEIRS if key not in ("tensor", "nested"))


def assert_alike(one, other):
    """Without what is not of a parameter."""
    assert_same(
        *(tuple(zip(*[(p.detach(), o.state.get(p, {})) for p in params_of(o)], strict=True)) for o in (one, other))
    )


@pytest.mark.parametrize("when", ["before the first step", "after it"])
@EVERY
def test_steps_and_state_dicts_and_copies_are_as_without(make, when):
    plain, optimizer, before = train(make(leaves()), 4), make(leaves()), int(when == "after it")
    train(with_theirs(train(optimizer, before)), 2 - before, start=before)
    given = saved_and_loaded(optimizer.state_dict())
    assert_has_theirs(given["state"])
    loaded = make(copies_of(optimizer))
    loaded.load_state_dict(given)
    for other in (optimizer, loaded, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert_has_theirs(other.state)
        assert_alike(train(other, 2, start=2), plain)


def test_torch_keeps_the_same():
    ours, theirs = (cls(leaves(), lr=1e-2) for cls in (fusedadam.AdamW, torch.optim.AdamW))
    states = []
    for optimizer in (ours, theirs):
        with_theirs(optimizer).register_state_dict_pre_hook(lambda o: o.state.update(hook=2))
        optimizer.register_load_state_dict_post_hook(lambda o: o.state.update(ran=True))
        set_grads(params_of(optimizer), 0)
        optimizer.step()
        given = optimizer.state_dict()
        optimizer.load_state_dict(given)
        states.append((given["state"], {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}))
    assert states[0][0].keys() == states[1][0].keys()
    assert states[0][1].keys() == states[1][1].keys() == {*THEIRS, "hook", "ran"}


def test_a_step_hook_may_count_there():
    optimizer = fusedadam.AdamW(leaves(), lr=1e-2)
    optimizer.register_step_pre_hook(lambda o, *_: o.state.update(steps=o.state.get("steps", 0) + 1))
    assert_alike(train(optimizer, 3), train(fusedadam.AdamW(leaves(), lr=1e-2), 3))
    assert optimizer.state["steps"] == 3


def test_a_checkpoint_that_creates_states_still_counts_no_step():
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    optimizer = fusedadam.EmaAdamW(leaves())
    optimizer.register_step_pre_hook(lambda o, *_: o.state.update(hook=1))
    _init_optim_state(optimizer)
    assert all(optimizer.state[param]["step"] == 0 for param in params_of(optimizer))


def test_everything_else_that_walks_the_states():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).to(BF16)
    optimizer = with_theirs(fusedadam.EmaAdamW(model.parameters(), storage="8bit"))
    assert "State: none yet" in repr(optimizer)
    optimizer.load_float32_state_dict(model, copy.deepcopy(model).float().state_dict())
    for storage in ("8bit", "exact", "16bit", None, "8bit"):
        optimizer.param_groups[0]["storage"] = storage
        train(optimizer, 1)
    assert "param_low" in repr(optimizer)
    assert "exp_avg_codes" in optimizer.memory_summary()
    with optimizer.ema_weights():
        pass
    optimizer.ema_state_dict(model)
    optimizer.float32_state_dict(model)
    wide = optimizer.widen_state_dict(optimizer.state_dict())
    assert_has_theirs(wide["state"])
    assert wide["state"][0]["exp_avg"].dtype == torch.float32
    optimizer.load_state_dict(wide)
    assert_has_theirs(optimizer.state)
    fusedadam.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    train(optimizer, 1)
    assert_has_theirs(optimizer.state)


def test_the_methods_of_single_optimizers():
    switching = with_theirs(train(fusedadam.ScheduleFreeAdamW(leaves()), 1))
    switching.eval()
    switching.train()
    train(switching, 1)
    assert len(with_theirs(train(fusedadam.AdamP(leaves()), 1)).projections()) == 4
    assert len(with_theirs(train(fusedadam.BertAdam(leaves(), t_total=10), 1)).get_lr()) == 4
    watching = with_theirs(fusedadam.AdamW(leaves()))
    watching.watch_norms = True
    assert len(train(watching, 1).norms().grad) == 4


def test_stepping_in_backward():
    model = torch.nn.Linear(4, 3)
    optimizer = with_theirs(fusedadam.step_in_backward(model, fusedadam.EmaAdamW))
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert_has_theirs(optimizer.state)
    assert optimizer.state[model.weight]["step"] == 2
