"""The results of one process, for all worlds: initial parameters, the gradients of each step, and final parameters.

Gradients for AdamP are constructed: their cosines are far from the threshold, and each parameter is projected by
channel, by layer and not at all.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fusedadam
from tests.meaning.made_to_measure import gradient, values
from tests.support import BF16, F32, F64

ADAM = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99)}
BERT = {"lr": 1e-2, "weight_decay": 0.1, "warmup": 0.3, "t_total": 20}
ELEMENTWISE = {
    "AdamW": functools.partial(fusedadam.AdamW, **ADAM),
    "Adam amsgrad": functools.partial(fusedadam.Adam, **ADAM, amsgrad=True),
    "EmaAdamW": functools.partial(fusedadam.EmaAdamW, **ADAM, ema_decay=0.9),
}
SUMMING = {
    "AdamP nesterov": functools.partial(fusedadam.AdamP, **ADAM, nesterov=True),
    "AdamP clipped": functools.partial(fusedadam.AdamP, **ADAM, max_grad_norm=1.0),
    "BertAdam parameter": functools.partial(fusedadam.BertAdam, **BERT, max_grad_norm=0.5, clip="parameter"),
    "BertAdam group": functools.partial(fusedadam.BertAdam, **BERT, clip="group"),
    "BertAdam all": functools.partial(fusedadam.BertAdam, **BERT, clip="all"),
    "EmaAdamW clipped": functools.partial(fusedadam.EmaAdamW, **ADAM, ema_decay=0.9, max_grad_norm=1.0),
}
OPTIMIZERS: dict[str, Callable[..., Any]] = ELEMENTWISE | SUMMING
# Beyond Adam: what is sharded is the base's business, so only some tests take these.
BEYOND_ADAM: dict[str, Callable[..., Any]] = {
    "SGD": functools.partial(fusedadam.SGD, lr=1e-2, weight_decay=0.1, momentum=0.9, dampening=0.5),
    "RMSpropTF": functools.partial(fusedadam.RMSpropTF, lr=1e-2, weight_decay=0.1, momentum=0.9),
    "Lamb": functools.partial(fusedadam.Lamb, **ADAM, use_global_grad_norm=True),
    "RAdam": functools.partial(fusedadam.RAdam, **ADAM),
    "Adan": functools.partial(fusedadam.Adan, **{**ADAM, "betas": (0.9, 0.7, 0.99)}, no_prox=True),
    "AdEMAMix": functools.partial(fusedadam.AdEMAMix, **{**ADAM, "betas": (0.9, 0.99, 0.999)}, alpha_warmup=3),
    "NAdam": functools.partial(fusedadam.NAdam, **ADAM, decoupled_weight_decay=True),
    "Adafactor": functools.partial(fusedadam.Adafactor, lr=1e-2, weight_decay=0.1),
    "Adafactor clipped": functools.partial(fusedadam.Adafactor, lr=1e-2, weight_decay=0.1, max_grad_norm=1.0),
    "Lion clipped": functools.partial(fusedadam.Lion, lr=1e-2, weight_decay=0.1, max_grad_norm=1.0),
}
# where nothing is summed, every bit is that of one process
BIT_FOR_BIT = {*ELEMENTWISE, "SGD", "RMSpropTF", "RAdam", "NAdam", "Adan", "AdEMAMix"}
DTYPES = {"float32": F32, "bfloat16": BF16, "float64": F64}
SHAPES = {
    "matrix": (6, 20),
    "uneven": (5, 7),
    "convolution": (3, 4, 3, 3),
    "one row": (1, 12),
    "one column": (8, 1),
    "long rows": (2, 8300),  # longer than the segments that rows are summed in
    "many rows": (1100, 3),  # more than a segment of rows
    "vector": (13,),
    "one element": (1,),
    "scalar": (),
}
KINDS = ("channels well below", "layer well below", "all well above")
STEPS = 4


class Run(NamedTuple):
    start: list[Tensor]
    grads: list[list[Tensor | None]]  # of each step
    params: list[Tensor]  # after the last step, as the states
    states: list[dict[str, Any]]
    norms: list[float | None]  # what the optimizer said after each step, as the projections
    projections: list[list[str]]


def make(optimizer: str, params: list[Any], **options: Any) -> Any:
    """Two groups, with options of their own. Low-precision parameters have moments and averages in float32."""
    wide = F32 if params[0].dtype == BF16 else None
    more = {"state_dtype": wide, **({"ema_dtype": wide} if optimizer.startswith("Ema") else {})}
    middle = len(params) // 2
    groups = [{"params": params[:middle]}, {"params": params[middle:], "lr": 3e-3, "weight_decay": 0.3}]
    return (OPTIMIZERS | BEYOND_ADAM)[optimizer](groups, **more, **options)


def after(optimizer: Any, params: list[Any]) -> tuple[float | None, list[str]]:
    norm = optimizer.grad_norm
    made = optimizer.projections() if hasattr(optimizer, "projections") else {}
    return None if norm is None else norm.item(), [made.get(p, "none") for p in params]


def one_process(
    optimizer: str,
    shapes: Iterable[tuple[int, ...]],
    dtypes: Sequence[torch.dtype] = (F32,),
    has_gradient: Callable[[int, int], bool] = lambda step, k: True,
    **options: Any,
) -> Run:
    """``dtypes`` in turn; ``has_gradient(step, k)``: whether the k-th parameter has one in that step."""
    start = [v.to(dtype) for v, dtype in zip(values(shapes), itertools.cycle(dtypes), strict=False)]
    params = [torch.nn.Parameter(v.clone()) for v in start]
    opt, generator = make(optimizer, params, **options), torch.Generator().manual_seed(5)
    run = Run(start, [], [], [], [], [])
    for step in range(STEPS):
        for k, p in enumerate(params):
            grad = gradient(p.detach().double(), KINDS[(step + k) % 3], step, generator).to(p.dtype)
            p.grad = grad if has_gradient(step, k) else None
        run.grads.append([p.grad for p in params])
        opt.step()
        norm, projections = after(opt, params)
        run.norms.append(norm)
        run.projections.append(projections)
    run.params.extend(p.detach() for p in params)
    run.states.extend(dict(opt.state.get(p, {})) for p in params)
    return run


class Library:
    """Runs by (optimizer, dtype), each made when it is first asked for, and kept in a file that all processes read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, optimizer: str, dtype: str) -> str:
        path = self._folder / f"{optimizer} {dtype}.pt"
        if not path.exists():
            torch.save(tuple(one_process(optimizer, SHAPES.values(), [DTYPES[dtype]])), path)
        return str(path)


@functools.cache
def load(path: str) -> Run:
    return Run(*torch.load(path))
