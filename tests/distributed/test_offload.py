"""``offload=True`` with sharded parameters: a state is a DTensor whose local part is in host memory.

A CPU stands in for the device (tests/host_memory.py), and the eager backend for kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import fusedadam
from fusedadam.tensors.host_memory import slab_of
from tests.distributed.follow import assert_states_lie_like
from tests.distributed.parts import S0, S1, R, fully_shard, mesh_of, parameter
from tests.distributed.test_storage import STEPS, assert_same, go, kept, start
from tests.distributed.world import NEEDS_FSDP2_ON_CPU, on
from tests.host_memory import pretended
from tests.support import BF16, F32

OPTIMIZERS = {
    "AdamW": functools.partial(fusedadam.AdamW, lr=1e-2, weight_decay=0.1),
    "EmaAdamW": functools.partial(fusedadam.EmaAdamW, lr=1e-2, ema_decay=0.9, max_grad_norm=1.0),
}


def hosted(optimizer: Any) -> list[Any]:
    return [v for state in optimizer.state.values() for v in state.values() if slab_of(v) is not None]


@on("two")
@pytest.mark.parametrize("layout", ["rows", "columns", "replicated"])
@pytest.mark.parametrize("storage", [None, "exact", "16bit", "8bit"])
def test_sharded_states_are_in_host_memory(layout, storage):
    placements = {"rows": (S0,), "columns": (S1,), "replicated": (R,)}[layout]
    for make in OPTIMIZERS.values():
        ends = []
        with pretended(smallest=1, allows_eager=True) as device:
            for offload in (False, True):
                wholes = [value for value in start(BF16 if storage else F32) if layout != "columns" or value.dim() == 2]
                params = [parameter(value, mesh_of(2), *placements) for value in wholes]
                optimizer = make(params, storage=storage, backend="eager", offload=offload)
                go(optimizer, params, range(2))
                assert bool(hosted(optimizer)) is offload
                for param in params:
                    assert_states_lie_like(param, optimizer.state[param])
                if offload:
                    assert all(isinstance(value, DTensor) for value in hosted(optimizer))
                    state = optimizer.state[params[0]]
                    name = next(name for name, value in state.items() if slab_of(value) is not None)
                    state[name] = state[name].clone()  # pageable: copied in by the next step
                    addresses = {value._local_tensor.data_ptr() for value in hosted(optimizer)}
                go(optimizer, params, range(2, STEPS))
                if offload:
                    assert addresses < {value._local_tensor.data_ptr() for value in hosted(optimizer)}
                    assert slab_of(state[name]) is not None
                    assert device.waits == 1  # for the state that was replaced
                ends.append([kept(optimizer, param) for param in params])
        assert_same(*ends)


def run(seed: int, offload: bool, storage: str | None) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 32)).to(BF16 if storage else F32)
    if torch.distributed.is_initialized():
        fully_shard(model, mesh=mesh_of(torch.distributed.get_world_size()))
    return model, fusedadam.EmaAdamW(model.parameters(), storage=storage, backend="eager", offload=offload)


def saved(folder: str, first: bool, storage: str | None) -> Any:
    model, optimizer = run(0, first, storage)
    go(optimizer, [*model.parameters()], range(2))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    go(optimizer, [*model.parameters()], range(2, STEPS))
    return [kept(optimizer, param) for param in model.parameters()]


def loaded(folder: str, then: bool, storage: str | None) -> Any:
    model, optimizer = run(1, then, storage)
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert bool(hosted(optimizer)) is then
    go(optimizer, [*model.parameters()], range(2, STEPS))
    return [kept(optimizer, param) for param in model.parameters()]


def saved_here(*arguments: Any) -> Any:
    with pretended(smallest=1, allows_eager=True):
        return saved(*arguments)


def loaded_here(*arguments: Any) -> Any:
    with pretended(smallest=1, allows_eager=True):
        return loaded(*arguments)


@NEEDS_FSDP2_ON_CPU
@pytest.mark.parametrize("storage", [None, "8bit"])
@pytest.mark.parametrize(("first", "then"), [(True, False), (False, True), (True, True)])
def test_checkpoints_are_resharded_with_and_without(two, three, tmp_path, storage, first, then):
    expected = two.run(saved_here, f"{tmp_path}", first, storage)[0]
    for found in three.run(loaded_here, f"{tmp_path}", then, storage):
        assert_same(found, expected)
