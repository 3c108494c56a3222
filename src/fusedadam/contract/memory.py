"""The memory that an optimizer keeps: ``memory_summary()``, and the last lines of ``repr(optimizer)``.

Counts the memory of this process: the local shard of a DTensor, and of an expanded gradient the elements that exist.
Nothing waits for a device. With ``storage=`` both also say what each role is kept in, and what stays wider and why.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fusedadam import backends
from fusedadam.contract import storage
from fusedadam.formats import FORMATS, names
from fusedadam.tensors import host_memory
from fusedadam.tensors.factored import shape_in
from fusedadam.tensors.shards import is_dtensor, local

if TYPE_CHECKING:
    from fusedadam.contract.base import FusedOptimizer

HOST = "host memory, page-locked"
PARAMETERS, GRADIENTS, TABLES = "parameters", "gradients", "launch tables"


class Kept(NamedTuple):
    """A piece of memory that belongs to an optimizer."""

    device: str
    what: str  # PARAMETERS, GRADIENTS, TABLES or the name of a state
    dtype: str
    elements: int
    bytes: int


def summary(optimizer: FusedOptimizer) -> str:
    """A table for each device: parameters, gradients, each state by dtype, and launch tables."""
    kept = list(_kept(optimizer))
    backends_by_device = dict(_backends(optimizer))
    params = [k for k in kept if k.what == PARAMETERS]
    lines = [
        f"{type(optimizer).__name__}: {len(params):,} parameter{'s' * (len(params) != 1)} of "
        f"{sum(k.elements for k in params):,} elements, "
        f"{readable(_state_bytes(kept))} of state{_where(optimizer)}",
        *_storage(optimizer),
        *_bus(optimizer),
    ]
    for device in dict.fromkeys(k.device for k in kept):
        here = [k for k in kept if k.device == device]
        title = f"{device}, served by {backends_by_device[device]}" if device in backends_by_device else device
        rows = [(title, "", "tensors", "elements", "memory")]
        for what, dtype in dict.fromkeys((k.what, k.dtype) for k in here):
            alike = [k for k in here if (k.what, k.dtype) == (what, dtype)]
            counts = ("", "") if what == TABLES else (f"{len(alike):,}", f"{sum(k.elements for k in alike):,}")
            rows.append((f"  {what}", dtype, *counts, readable(sum(k.bytes for k in alike))))
        rows.append(("  in all", "", "", "", readable(sum(k.bytes for k in here))))
        lines += ["", *_aligned(rows)]
    return "\n".join(lines)


def _where(optimizer: FusedOptimizer) -> str:
    """Sharded tensors are counted by what this process has of them."""
    return " on this process" if any(map(is_dtensor, optimizer._params())) else ""


def described(text: str, optimizer: FusedOptimizer) -> str:
    """torch's own representation, with devices, backends and bytes of state added."""
    with contextlib.suppress(Exception):  # a debugger may ask while tensors are in any condition
        kept = list(_states(optimizer))
        names = ", ".join(dict.fromkeys(k.what for k in kept))
        served = ", ".join(f"{device} (served by {backend})" for device, backend in _backends(optimizer))
        state = f"{readable(_state_bytes(kept))} ({names})" if kept else "none yet"
        lines = [f"Device: {served or 'none'}", f"State: {state}", *_storage(optimizer), ")"]
        return text.removesuffix(")") + "\n".join(lines)
    return text


def readable(count: float) -> str:
    """A number of bytes, such as "1.5 MiB"."""
    if count < 1024:
        return f"{count:.0f} bytes"
    power = min(4, int(math.log2(count)) // 10)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def _storage(optimizer: FusedOptimizer) -> Iterator[str]:
    """What ``storage=`` keeps each role in, before the first step, too; nothing without it."""
    size, elements = 0.0, 0
    titles: dict[str, dict[str, None]] = {}
    wider: dict[tuple[str, str, str], list[int]] = {}  # the sizes of the parameters
    for group in optimizer.param_groups:
        for param in group["params"]:
            if is_lazy(param):
                continue
            chosen = optimizer.storage_of(group, param)
            count = local(param).numel() if chosen.reasons or chosen.formats else 0
            elements += count
            spaces, shape = optimizer.rule.spaces, local(param).shape
            size += sum(
                FORMATS[fmt].bytes() * (shape_in(spaces[role], shape).numel() if count else 0)
                for role, fmt in chosen.formats.items()
            )
            if param.is_complex():  # roles without a format, in the parameter's own dtype
                size += count * len(chosen.reasons) * param.element_size()
            for role in chosen.formats.keys() - chosen.reasons.keys():
                titles.setdefault(role, {})[_title(chosen.formats[role])] = None
            for each in _wider(chosen, [role for role in ("param", *optimizer.states) if role in chosen.reasons]):
                wider.setdefault(each, []).append(count)
    if elements:
        roles = [role for role in ("param", *optimizer.states) if role in titles]
        kept = ", ".join(f"{role} {' and '.join(titles[role])}" for role in roles)
        yield f"Storage: {size / elements:.2f} bytes a parameter, weights and states{kept and f' ({kept})'}"
    for (roles_of, how, why), sizes in wider.items():
        many = f"{len(sizes):,} parameter{'s' * (len(sizes) != 1)} of {sum(sizes):,} elements"
        are = "are" if " and " in roles_of or (len(sizes) > 1 and not roles_of) else "is"
        yield f"  {roles_of}{many} {are} kept {how}: {why}"


def _bus(optimizer: FusedOptimizer) -> Iterator[str]:
    """What the last step has moved between host and device, where states are in host memory: a rule that visits the
    elements several times reads some of them each time."""
    params, read, written = optimizer._params(), 0, 0
    for plan, indices in optimizer._last_plans():
        if not plan.slabs:
            continue
        for table in (launch.table for launch in plan.launches):
            sizes: dict[str, int] = {}
            for k in table.member_indices:
                state = optimizer.state.get(params[indices[k]], {})
                for name, (role, _) in table.arrays.items():
                    if host_memory.slab_of(state.get(name)) is not None:
                        sizes[role] = sizes.get(role, 0) + local(state[name]).nbytes
            read += sum(sizes.get(role, 0) for stage in table.specialized.stages for role in stage.reads)
            written += sum(sizes.get(role, 0) for stage in table.specialized.stages for role in stage.writes)
    if read or written:
        yield f"Bus: a step moves {readable(read)} to the device and {readable(written)} back"


def _wider(chosen: storage.Choice, roles: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """``roles`` are kept wider than asked for: which, how and why."""
    if roles and chosen.is_exact:
        yield "", "exactly", [*chosen.reasons.values()][-1]  # what the parameter lacks comes after what its states do
        return
    alike: dict[tuple[str, str], list[str]] = {}
    for role in roles:
        alike.setdefault((_title(chosen.formats[role]), chosen.reasons[role]), []).append(role)
    yield from ((f"{' and '.join(same)} of ", f"in {title}", why) for (title, why), same in alike.items())


def _title(fmt: str) -> str:
    return FORMATS[fmt].title or names([FORMATS[fmt].arrays[0].dtype])


def _kept(optimizer: FusedOptimizer) -> Iterator[Kept]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    yield from (_tensor(PARAMETERS, param) for param in params)
    yield from (_tensor(GRADIENTS, param.grad) for param in params if param.grad is not None)
    yield from _states(optimizer)
    yield from _tables(optimizer)


def _states(optimizer: FusedOptimizer) -> Iterator[Kept]:
    states = [(name, value) for _, state in optimizer._states_of_params() for name, value in state.items()]
    for wanted in dict.fromkeys(name for name, _ in states):
        yield from (_tensor(name, v) for name, v in states if name == wanted and isinstance(v, Tensor))


def _tables(optimizer: FusedOptimizer) -> Iterator[Kept]:
    """The memory of plans: tables of addresses and scalars, sums by row and by segment."""
    in_backward = optimizer._in_backward.steppers.values() if optimizer._in_backward is not None else ()
    steppers = [optimizer._stepper, *in_backward]
    kept = [plan for s in steppers for _, plan in s.plans.values()]
    plans = [*kept, *(plan for s in steppers for plan in (s.last_plan, *s.captured_plans) if plan is not None)]
    seen: set[int] = set()
    for launch in (launch for plan in {id(plan): plan for plan in plans}.values() for launch in plan.launches):
        table = launch.table
        buffers = (*table.row_buffers, *table.column_buffers, *table.partials.values())
        products = () if table.operands is None else (_whole(table.operands),)
        for tensor in (torch.from_numpy(table.words), table.on_device, *buffers, *products):
            if tensor.data_ptr() not in seen:  # on a CPU the words are the table itself
                seen.add(tensor.data_ptr())
                yield _tensor(TABLES, tensor)._replace(dtype="")


def _whole(part: Tensor) -> Tensor:
    """All of the memory that it is a part of."""
    return part.new_empty(0, dtype=torch.uint8).set_(part.untyped_storage())


def _tensor(what: str, tensor: Tensor) -> Kept:
    here = local(tensor)
    if is_lazy(here):
        return Kept(str(here.device), what, "not yet initialized", 0, 0)
    device = HOST if host_memory.slab_of(here) is not None else str(here.device)
    dtype = str(here.dtype).removeprefix("torch.")
    strides = here.stride() if here.layout == torch.strided else [1] * here.dim()
    existing = math.prod(n for n, stride in zip(here.shape, strides, strict=True) if stride or n == 0)
    return Kept(device, what, dtype, here.numel(), existing * here.element_size())


def _backends(optimizer: FusedOptimizer) -> Iterator[tuple[str, str]]:
    """Each device of parameters, and the backends that update them."""
    found: dict[Any, dict[str, None]] = {}
    for group in optimizer.param_groups:
        for device in dict.fromkeys(param.device for param in group["params"]):
            found.setdefault(device, {})[group.get("backend") or backends.best(device)[0]] = None
    yield from ((str(device), " and ".join(names)) for device, names in found.items())


def _state_bytes(kept: list[Kept]) -> int:
    return sum(k.bytes for k in kept if k.what not in (PARAMETERS, GRADIENTS, TABLES))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(c.rjust(w) if k > 1 else c.ljust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
