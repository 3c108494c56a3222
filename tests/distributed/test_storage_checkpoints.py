"""Checkpoints of sharded optimizers whose storage changes: any number of processes goes on with the same bits.

test_every_checkpoint.py has those whose storage stays the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fusedadam
from tests.distributed.parts import fully_shard, mesh_of
from tests.distributed.test_checkpoints import alike, digest
from tests.distributed.test_storage import OPTIMIZERS, STEPS, Holder, go, kept
from tests.distributed.world import NEEDS_FSDP2_ON_CPU
from tests.support import BF16, F32

HALF = STEPS // 2
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

    def state(self, widen: bool = False) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": self.optimizer.widen_state_dict(optimizer) if widen else optimizer}

    def load(self, folder: str, widen: bool = False) -> Run:
        state = self.state(widen)
        dcp.load(state, checkpoint_id=folder)
        given = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **given)
        return self

    def bits(self) -> list[str]:
        return [
            f"{k} {name} {digest(value.view(torch.int16) if value.dtype == BF16 else value)}"
            for k, p in enumerate(self.params)
            for name, value in kept(self.optimizer, p).items()
        ]


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
