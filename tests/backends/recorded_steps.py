"""Steps whose results are written down: a hash of every bit, the same on all backends and machines.

A change of the code that must not change numbers is tested against them. A change that must:

    python -m tests.backends.recorded_steps      writes recorded_steps.json again, with Numba
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fusedadam
from tests.support import BF16, CASES, F16, F32, F64, SUMMING, Case, apply, draw

RECORD = Path(__file__).with_name("recorded_steps.json")
SHAPES = [(3,), (), (5, 7), (2, 3, 4), (300, 17), (0, 4), (2, 5000)]
MIXES = {
    "f32": (F32,),
    "f64": (F64,),
    "bf16": (BF16,),
    "f16": (F16,),
    "bf16 params, f32 states": (BF16, BF16, F32, F32, F32),
    "f32 params, bf16 grads": (F32, BF16, F32, F16, BF16),
}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (fusedadam.AdamW, {"lr": 0.01}),
    "AdamW amsgrad clipped": (fusedadam.AdamW, {"lr": 0.01, "amsgrad": True, "max_grad_norm": 0.5}),
    "Adam maximize": (fusedadam.Adam, {"lr": 0.01, "maximize": True, "weight_decay": 0.1}),
    "AdamP nesterov": (fusedadam.AdamP, {"lr": 0.01, "nesterov": True, "weight_decay": 0.1}),
    "BertAdam": (fusedadam.BertAdam, {"lr": 0.01, "warmup": 0.25, "t_total": 20, "schedule": "warmup_cosine"}),
    "BertAdam clip=group": (fusedadam.BertAdam, {"lr": 0.01, "clip": "group", "max_grad_norm": 0.1}),
    "EmaAdamW": (fusedadam.EmaAdamW, {"lr": 0.01, "ema_dtype": F32}),
    "SGD nesterov": (fusedadam.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    "RMSpropTF centered": (fusedadam.RMSpropTF, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "Lamb": (fusedadam.Lamb, {"lr": 0.01, "max_weight_norm": 2.0}),
    "NAdam": (fusedadam.NAdam, {"lr": 0.01, "weight_decay": 0.1}),
    "Adafactor clipped": (fusedadam.Adafactor, {"lr": 0.05, "weight_decay": 0.1, "max_grad_norm": 0.5}),
    "EmaAdamW bf16 states": (fusedadam.EmaAdamW, {"lr": 0.01, "state_dtype": BF16, "max_grad_norm": 0.5}),
}


def digest(results: Iterable[Mapping[str, Tensor]]) -> str:
    hashed = hashlib.sha256()
    for own in results:
        for name in sorted(own):
            hashed.update(
                name.encode() + own[name].detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes()
            )
    return hashed.hexdigest()[:16]


def by_rule(place: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """One step of each rule under each choice of flags, for each mix of dtypes."""
    for case in [*CASES, *SUMMING]:
        for name, dtypes in MIXES.items():
            yield f"{case.id} / {name}", one_step(case, dtypes, place)


def one_step(case: Case, dtypes: tuple[torch.dtype, ...], place: tuple[str, str]) -> str:
    return digest(apply(case, draw(case, SHAPES, dtypes), place))


def by_optimizer(place: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Five steps of each optimizer, in two groups with an lr that changes and a gradient that is missing once."""
    for name, (kind, options) in OPTIMIZERS.items():
        for dtype in (F32, BF16):
            yield f"{name} / {dtype}", digest(training(kind, options, dtype, place))


def training(
    kind: Any, options: Mapping[str, Any], dtype: torch.dtype, place: tuple[str, str]
) -> list[dict[str, Tensor]]:
    device, backend = place
    generator = torch.Generator().manual_seed(1)

    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=generator).sub(0.5).to(device, dtype)

    params = [nn.Parameter(random(shape)) for shape in SHAPES]
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.02, "weight_decay": 0.3}]
    optimizer = kind(groups, **options, backend=backend)
    for step in range(5):
        for k, p in enumerate(params):
            p.grad = None if (step, k) == (2, 1) else random(SHAPES[k])
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        optimizer.step()
    states = [{n: t for n, t in optimizer.state[p].items() if isinstance(t, Tensor)} for p in params]
    return [{"param": p.data, **own} for p, own in zip(params, states, strict=True)]


if __name__ == "__main__":
    with RECORD.open("w", encoding="utf-8") as file:
        json.dump({**dict(by_rule(("cpu", "numba"))), **dict(by_optimizer(("cpu", "numba")))}, file, indent=0)
