"""Bytes moved, kept and needed temporarily."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusedadam import AdamP, AdamW, BertAdam, EmaAdamW, Muon
from fusedadam.cli import contestants
from fusedadam.cli.harness import contestant
from fusedadam.cli.harness.contestant import Contestant
from fusedadam.cli.harness.timing import parameters_with_gradients
from fusedadam.contract.base import FusedOptimizer

F32, BF16 = torch.float32, torch.bfloat16


def stepped(cls: type[FusedOptimizer], shape: tuple[int, ...], dtype: torch.dtype = F32, **options: Any) -> Any:
    optimizer = cls(parameters_with_gradients([shape], "cpu", dtype), **options)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("cls", "shape", "dtype", "options", "each"),
    [
        (AdamW, (10, 10), F32, {}, 28),
        (AdamW, (10, 10), BF16, {}, 14),
        (AdamW, (10, 10), BF16, {"state_dtype": F32}, 22),
        (AdamW, (10, 10), F32, {"amsgrad": True}, 36),
        (AdamW, (10, 10), F32, {"max_grad_norm": 1.0}, 32),
        (EmaAdamW, (10, 10), F32, {}, 36),
        (BertAdam, (10, 10), F32, {}, 32),
        (AdamP, (10, 10), F32, {}, 40),
        (AdamP, (100,), F32, {}, 28),
        (Muon, (10, 10), F32, {}, 28),
        (Muon, (10, 10), BF16, {}, 18),
        (Muon, (100,), F32, {"use_muon": None}, 28),
    ],
)
def test_bytes_a_parameter_follow_from_the_rule(
    cls: type[FusedOptimizer], shape: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any], each: int
) -> None:
    assert contestant.bytes_moved(stepped(cls, shape, dtype, **options)) == 100 * each


@pytest.mark.parametrize(
    ("cls", "dtype", "options", "each"),
    [
        (AdamW, BF16, {"storage": "exact"}, 26),
        (AdamW, BF16, {"storage": "16bit"}, 18),
        (AdamW, BF16, {"storage": "8bit"}, 12.125),  # 3 + 1 + 1/32 + 1 + 1/32, read and written, and a gradient
        (AdamW, F32, {"storage": "8bit"}, 16.125),
        (AdamW, BF16, {"storage": "8bit", "amsgrad": True}, 26.0625),
        (AdamW, BF16, {"storage": "8bit", "max_grad_norm": 1.0}, 14.125),
        (EmaAdamW, BF16, {"storage": "8bit"}, 18.125),
        (AdamP, BF16, {"storage": "8bit"}, 19.1875),  # read twice, and stored in the last visit only
    ],
)
def test_formats_move_their_own_bytes(
    cls: type[FusedOptimizer], dtype: torch.dtype, options: dict[str, Any], each: float
) -> None:
    optimizer = stepped(cls, (64, 64), dtype, **options)
    assert contestant.bytes_moved(optimizer) == 4096 * each


def test_states_are_counted_wherever_they_are_kept() -> None:
    params = parameters_with_gradients([(100, 100)], "cpu", F32)
    for name, kept in (("AdamW", 80_000), ("EmaAdamW", 120_000)):
        for by in ("fusedadam", contestants.peers_of(name)[0].name):
            optimizer = contestants.make(name, by, params)
            optimizer.step()
            assert kept <= contestant.state_bytes(optimizer, params) < kept * 1.02, (name, by)


class TakesGradients(torch.optim.AdamW):
    """As HeavyBall does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert all(param.grad is not None for param in self.param_groups[0]["params"])
        super().step(closure)
        self.zero_grad()


class Offloading(torch.optim.AdamW):
    """Steps where a hook has seen a gradient, as torchao's CPUOffloadOptimizer does."""

    needs_backward = True

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.seen: list[torch.Tensor] = []
        for param in params:
            param.register_post_accumulate_grad_hook(self.seen.append)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert len(self.seen) == len(self.param_groups[0]["params"])
        self.seen.clear()
        super().step(closure)


@pytest.mark.parametrize("make", [TakesGradients, Offloading])
def test_each_step_has_new_gradients_where_it_needs_them(make: Any) -> None:
    one, plain = (Contestant(m, [(8, 4), (3,)], "float32", "cpu", 1e-4) for m in (make, torch.optim.AdamW))
    for each in (one, plain):
        each.prepare()
        first = each.first_step()
        each.turn()
        assert first.ms > 0
        assert first.allocated is None
    assert one.before is not None
    assert plain.before is None
    one.renew_gradients()
    for mine, theirs in zip(one.params, plain.params, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=0)


@pytest.mark.parametrize("make", [TakesGradients, Offloading, torch.optim.AdamW])
def test_on_a_gpu_the_allocator_says_what_an_optimizer_keeps(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator that counts parameters, gradients and states: gradients that a step took do not hide its states."""
    one = Contestant(make, [(8, 4), (3,)], "float32", "cpu", 1e-4)

    def allocated(device: str) -> int:
        states = [
            state
            for own in getattr(one, "optimizer", SimpleNamespace(state={})).state.values()
            for state in own.values()
        ]
        grads = [param.grad for param in one.params if param.grad is not None]
        return sum({t.data_ptr(): t.nbytes for t in (*one.params, *one.grads, *grads, *states)}.values())

    monkeypatch.setattr(contestant, "allocated", allocated)
    one.prepare()
    assert one.first_step().allocated == 2 * 35 * 4 + 2 * 4


def test_the_allocator_is_asked_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", {"cuda:1": 7}.get)
    assert contestant.allocated("cuda:1") == 7
    assert contestant.allocated("cpu") is None
