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

from fusedadam.catalog import CATALOG
from tests.meaning.made_to_measure import gradient, values
from tests.support import BF16, F32, F64, sums

DELTA = 0.1  # AdamP's threshold, which the gradients are made for
EVERY: dict[str, Any] = {
    name: functools.partial(make, delta=DELTA) if "delta" in make.keywords else make
    for entry in CATALOG.values()
    for name, make in entry.tested.items()
}
# where nothing is summed, every bit is that of one process
BIT_FOR_BIT = {name for name, make in EVERY.items() if not sums(make)}
ELEMENTWISE = {name: EVERY[name] for name in ("AdamW", "Adam", "EmaAdamW")}
OF_SUMS = ("AdamP", "AdamP clipped", "BertAdam", "BertAdam by group", "BertAdam over all", "EmaAdamW clipped")
SUMMING = {name: EVERY[name] for name in OF_SUMS}
MULTIPLYING = {"Muon": EVERY["Muon"]}
OPTIMIZERS = ELEMENTWISE | SUMMING | MULTIPLYING
# What is sharded is the base's business, so only some tests take the others, and quick tests those with other sums or
# states.
REST = {name: make for name, make in EVERY.items() if name not in OPTIMIZERS}
QUICK_REST = [name for name in REST if name in CATALOG]
QUICK_REST += [[*entry.tested][-1] for entry in CATALOG.values() if entry.quick]
# states smaller than their parameters
SMALLER = [e.name for e in CATALOG.values() if any(state.by != "element" for state in e.cls.states.values())]
NOT_SHARED = [name for name in SMALLER if name in BIT_FOR_BIT]  # each process has its own
assert {*ELEMENTWISE} < BIT_FOR_BIT
assert not {*SUMMING} & BIT_FOR_BIT
assert 0 < len(NOT_SHARED) < len(SMALLER)
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
    made = EVERY[optimizer]
    more = {"state_dtype": wide, **{state.dtype_option: wide for state in made.func.states.values()}}
    middle = len(params) // 2
    groups = [{"params": params[:middle]}, {"params": params[middle:], "lr": 3e-3, "weight_decay": 0.3}]
    return made(groups, **more, **options)


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
