"""Checkpoints of sharded optimizers with storage formats: any number of processes goes on with the same bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import fusedadam
from tests.distributed.parts import fully_shard, mesh_of
from tests.distributed.test_checkpoints import FLAT, FULL, alike, digest
from tests.distributed.test_storage import OPTIMIZERS, STEPS, STORAGES, Holder, go, kept
from tests.distributed.world import NEEDS_FSDP2_ON_CPU
from tests.support import BF16, F32

HALF = STEPS // 2
CASES = [(optimizer, storage) for optimizer in OPTIMIZERS for storage in STORAGES]
QUICK = [("EmaAdamW", "8bit"), ("AdamW", "exact")]
EVERY = pytest.mark.parametrize(
    ("optimizer", "storage"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.exhaustive) for case in CASES],
)
pytestmark = NEEDS_FSDP2_ON_CPU


class Run:
    """``more``: fresh models begin with other weights, so that what is not loaded shows."""

    def __init__(
        self, optimizer: str, storage: str | None, plain: bool = False, more: float = 0.0, **options: Any
    ) -> None:
        self.model = Holder(BF16, more)
        if not plain:
            fully_shard(self.model, mesh=mesh_of(dist.get_world_size()))
        self.params = list(self.model.parameters())
        self.optimizer = OPTIMIZERS[optimizer](self.params, storage=storage, backend="eager", **options)

    def train(self, first: int, last: int) -> Run:
        go(self.optimizer, self.params, range(first, last))
        return self

    def state(self, options: StateDictOptions | None = None, widen: bool = False) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": self.optimizer.widen_state_dict(optimizer) if widen else optimizer}

    def set_state(self, state: dict[str, Any], options: StateDictOptions | None = None) -> Run:
        given = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **given, options=options)
        return self

    def load(self, folder: str, options: StateDictOptions | None = None, widen: bool = False) -> Run:
        state = self.state(options, widen)
        dcp.load(state, checkpoint_id=folder)
        return self.set_state(state, options)

    def bits(self) -> list[str]:
        return [
            f"{k} {name} {digest(value.view(torch.int16) if value.dtype == BF16 else value)}"
            for k, p in enumerate(self.params)
            for name, value in kept(self.optimizer, p).items()
        ]


def uninterrupted(optimizer: str, storage: str) -> list[str]:
    return Run(optimizer, storage, plain=True).train(0, STEPS).bits()


def save(folder: str, optimizer: str, storage: str) -> list[str]:
    run = Run(optimizer, storage).train(0, HALF)
    dcp.save(run.state(), checkpoint_id=folder)
    dcp.save(run.state(FLAT), checkpoint_id=f"{folder}, flat")
    return run.train(HALF, STEPS).bits()


def go_on(folder: str, optimizer: str, storage: str, flat: bool) -> list[str]:
    run = Run(optimizer, storage, more=1.0)
    run.load(f"{folder}, flat", FLAT) if flat else run.load(folder)
    return run.train(HALF, STEPS).bits()


@EVERY
def test_saved_on_four_and_loaded_on_three_and_one(four, three, one, optimizer, storage, tmp_path):
    expected = uninterrupted(optimizer, storage)
    assert alike(four.run(save, str(tmp_path / "saved"), optimizer, storage)) == expected
    for world, flat in ((three, False), (one, False), (three, True)):
        assert alike(world.run(go_on, str(tmp_path / "saved"), optimizer, storage, flat)) == expected


def through_full(optimizer: str, storage: str) -> list[list[str]]:
    """Gathered by rank 0, on the host, and broadcast from there; or offloaded shard by shard."""
    run = Run(optimizer, storage).train(0, HALF)
    # copies: on a CPU some of it is the optimizer's own memory
    full, offloaded = (copy.deepcopy(run.state(own)) for own in (FULL, StateDictOptions(cpu_offload=True)))
    found = [run.train(HALF, STEPS).bits()]
    assert bool(full["optimizer"]) == (dist.get_rank() == 0)
    if dist.get_rank() == 0:
        assert {type(v) for state in full["optimizer"]["state"].values() for v in state.values()} == {Tensor}
        found.append(Run(optimizer, storage, plain=True, more=1.0).set_state(full).train(HALF, STEPS).bits())
    else:
        found.append(found[0])
    other = Run(optimizer, storage, more=1.0)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other.model, full["model"], options=options)
    set_optimizer_state_dict(other.model, other.optimizer, full["optimizer"], options=options)
    found.append(other.train(HALF, STEPS).bits())
    found.append(Run(optimizer, storage, more=1.0).set_state(offloaded).train(HALF, STEPS).bits())
    return found


@EVERY
def test_full_state_dicts(two, optimizer, storage):
    assert alike(two.run(through_full, optimizer, storage)) == [uninterrupted(optimizer, storage)] * 4


def save_float32(folder: str) -> None:
    run = Run("EmaAdamW", None, state_dtype=F32, ema_dtype=F32).train(0, HALF)
    dcp.save(run.state(), checkpoint_id=folder)


def narrow(folder: str) -> list[str]:
    """A float32 checkpoint has no codes: a wide template takes it."""
    return Run("EmaAdamW", "8bit", more=1.0).load(folder, widen=True).train(HALF, STEPS).bits()


def narrowed_alone() -> list[str]:
    wide = Run("EmaAdamW", None, plain=True, state_dtype=F32, ema_dtype=F32).train(0, HALF)
    run = Run("EmaAdamW", "8bit", plain=True, more=1.0)
    run.model.load_state_dict(wide.model.state_dict())
    run.optimizer.load_state_dict(wide.optimizer.state_dict())
    return run.train(HALF, STEPS).bits()


def test_a_float32_checkpoint_goes_on_in_8_bits(four, three, one, tmp_path):
    four.run(save_float32, str(tmp_path / "float32"))
    expected = narrowed_alone()
    for world in (three, one):
        assert alike(world.run(narrow, str(tmp_path / "float32"))) == expected


def save_widened(folder: str) -> None:
    dcp.save(Run("EmaAdamW", "8bit").train(0, HALF).state(widen=True), checkpoint_id=folder)


def widen(folder: str) -> list[str]:
    run = Run("EmaAdamW", None, more=1.0, state_dtype=F32, ema_dtype=F32)
    return run.load(folder).train(HALF, STEPS).bits()


def widened_alone() -> list[str]:
    narrow = Run("EmaAdamW", "8bit", plain=True).train(0, HALF)
    run = Run("EmaAdamW", None, plain=True, more=1.0, state_dtype=F32, ema_dtype=F32)
    run.model.load_state_dict(narrow.model.state_dict())
    run.optimizer.load_state_dict(fusedadam.EmaAdamW.widen_state_dict(narrow.optimizer.state_dict()))
    return run.train(HALF, STEPS).bits()


def test_an_8_bit_run_goes_on_in_float32(four, three, one, tmp_path):
    four.run(save_widened, str(tmp_path / "widened"))
    expected = widened_alone()
    for world in (three, one):
        assert alike(world.run(widen, str(tmp_path / "widened"))) == expected
