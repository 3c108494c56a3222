"""Steps as in a training, on one device with one backend, with everything that they read and write."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fusedadam.cli.verify.bounded import F64
from fusedadam.cli.verify.cases import F32, Case, Options
from fusedadam.cli.verify.judge import Member
from fusedadam.contract.group_options import method_of
from fusedadam.contract.role_arrays import value_of, weight_of
from fusedadam.engine.participant import check_shape

STEPS = 3
SCALE = 1024.0  # of gradients, as by a GradScaler: a power of two, so that no bit is lost
SKIPPED = 1.0  # its found_inf

# Sizes around the chunks of kernels (1,024, 8,192 and 32,768), enough in all for several threads; rows longer than a
# segment of a sum, and more rows than a segment has.
SHAPES = [(), (1,), (0,), (1023,), (1025,), (8193,), (32769,), (5, 7), (2, 8193), (1025, 3), (4, 3, 3, 3)]


class Place(NamedTuple):
    device: str
    backend: str

    def __str__(self) -> str:
        return f"{self.device} {self.backend}"


Layout: TypeAlias = tuple[tuple[int, ...], Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Step:
    layouts: Sequence[Layout]
    members: list[Member]  # empty if the step must be skipped because a GradScaler found an infinity
    after: list[dict[str, Tensor]]  # as it is kept
    values: list[dict[str, Tensor]]  # as numbers


def transposed(value: Tensor) -> Tensor:
    return value.t().contiguous().t()


def channels_last(value: Tensor) -> Tensor:
    return value.contiguous(memory_format=torch.channels_last)


def with_gaps(value: Tensor) -> Tensor:
    wide = torch.empty((*value.shape[:-1], 2 * value.shape[-1]), dtype=value.dtype, device=value.device)
    return wide[..., ::2].copy_(value)


def unaligned(value: Tensor) -> Tensor:
    longer = torch.empty(value.numel() + 1, dtype=value.dtype, device=value.device)
    return longer[1:].view(value.shape).copy_(value)


LAYOUTS: list[Layout] = [
    *((shape, Tensor.clone) for shape in SHAPES),
    ((70, 30), transposed),
    ((4, 8, 3, 3), channels_last),
    ((40, 51), with_gaps),
    ((2049,), unaligned),
    ((67, 96), Tensor.clone),  # with blocks, for formats of 8 bits
    ((9, 1056), unaligned),
]


def layouts_of(case: Case) -> list[Layout]:
    """Those with a shape that the optimizer takes: vectors are refused by some, and convolutions. Options decide, and
    neither dtypes nor storage."""
    return _taken(case.optimizer, case.changed)


@functools.cache
def _taken(name: str, changed: Options) -> list[Layout]:
    return [layout for layout in LAYOUTS if _refusal(name, changed, layout[0]) is None]


def _refusal(name: str, changed: Options, shape: tuple[int, ...]) -> str | None:
    params = [torch.nn.Parameter(torch.zeros(shape)) for _ in range(2)]
    try:
        optimizer = Case(name, changed, F32, F32).make(params, "eager")
        check_shape(optimizer.specialized(optimizer.param_groups[0], params[0]), shape)
    except ValueError as error:
        return str(error)
    return None


def take(case: Case, place: Place, seed: int) -> list[Step]:
    """The steps of a case, with the same parameters and gradients in every place."""
    generator, layouts = torch.Generator().manual_seed(seed), layouts_of(case)
    if not layouts:
        why = _refusal(case.optimizer, case.changed, LAYOUTS[-1][0])
        raise ValueError(f"no tensor of {len(LAYOUTS)} is taken; of the last one: {why}")
    values = [_away_from_zero(shape, generator).to(case.param) for shape, _ in layouts]
    params = [
        torch.nn.Parameter(layout(value.to(place.device))) for value, (_, layout) in zip(values, layouts, strict=True)
    ]
    optimizer = case.make(params, place.backend)
    groups = {id(p): k for k, group in enumerate(optimizer.param_groups) for p in group["params"]}
    if case.scaled:
        scaler: Any = optimizer
        scaler.grad_scale, scaler.found_inf = (torch.full((1,), x, device=place.device) for x in (SCALE, 0.0))
    steps: list[Step] = []
    before = [_start(optimizer, groups[id(p)], p) for p in params]
    for _ in range(STEPS):
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] *= 0.9  # as a scheduler does
        flags, options, *_ = optimizer._options()
        members = []
        for k, param in enumerate(params):
            own = groups[id(param)]
            grad = _gradient(case, before[k]["param"], k, generator)
            given = (grad * SCALE if case.scaled else grad).to(place.device)
            param.grad = with_gaps(given) if given.dim() and k % 3 == 1 else given  # other strides than the parameter's
            named = dict(zip(optimizer._flags, flags[own], strict=True))
            numbers = dict(zip(optimizer.rule.hyper_parameters, options[own], strict=True))
            method = method_of(type(optimizer), optimizer.param_groups[own])
            members.append(Member({**before[k], "grad": grad}, named, numbers, own, method))
        optimizer.step()
        after = [_stored(p, optimizer.state[p]) for p in params]
        before = after if case.storage is None else [_values(optimizer, own) for own in after]
        steps.append(Step(layouts, members, after, before))
    if case.scaled:
        scaler.found_inf.fill_(SKIPPED)
        optimizer.step()
        after = [_stored(p, optimizer.state[p]) for p in params]
        steps.append(Step(layouts, [], after, after))
    return steps


def difference(a: Step, b: Step) -> str | None:
    """Describes the first bits that differ."""
    for (shape, _), x, y in zip(a.layouts, a.after, b.after, strict=True):
        for role in x:
            other = bits(x[role]) != bits(y[role])
            if other.any():
                at = tuple(other.nonzero()[0].tolist())
                said = f"{x[role][at].item()!r} and {y[role][at].item()!r}"
                return f"{role} of the tensor of shape {shape} at {at}: {said}"
    return None


def bits(tensor: Tensor) -> Tensor:
    """As integers, which distinguishes 0 from -0 and compares NaNs."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _away_from_zero(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    size = torch.rand(shape, generator=generator, dtype=F64) + 0.5
    return torch.where(torch.rand(shape, generator=generator) < 0.5, -size, size)


def _gradient(case: Case, param: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Clearly perpendicular to each row, or to the whole parameter, or to neither, as AdamP distinguishes them."""
    grad = _away_from_zero(tuple(param.shape), generator)
    if param.dim() > 1:
        if k % 3 == 2:
            return torch.copysign(grad, param.double()).to(case.param)
        rows, raw = (t.double().reshape(t.shape[0] if k % 3 == 0 else 1, -1) for t in (param, grad))
        along = (rows * raw).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True)
        grad = (raw - rows * along).reshape(param.shape)
    return grad.to(case.param)


def _start(optimizer: Any, group: int, param: Tensor) -> dict[str, Tensor]:
    options = optimizer.param_groups[group]
    states = optimizer.specialized(options, param).states
    if options.get("storage") is not None:
        param, options = param.detach().float(), {}
    return _stored(param, {name: optimizer.states[name].new(param, options) for name in states})


def _values(optimizer: Any, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is kept in storage formats, as float32."""
    states = {role: value_of(role, kept, optimizer.states) for role in optimizer.states}
    return {"param": weight_of(kept["param"], kept), **{k: v for k, v in states.items() if v is not None}}


def _stored(param: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
    kept = {"param": param, **{name: value for name, value in state.items() if name != "step"}}
    return {name: value.detach().cpu().clone().contiguous() for name, value in kept.items()}
