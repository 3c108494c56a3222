"""Bytes moved, kept and needed temporarily."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusedadam import AdamP, AdamW, BertAdam, EmaAdamW
from fusedadam.cli import contestants
from fusedadam.cli.harness import contestant
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
