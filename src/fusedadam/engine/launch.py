"""Launches: what a step runs, stage by stage, over all parameters that take part in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedadam.engine.backend import Backend, Run, SharedTerm, sum_across_devices
from fusedadam.engine.launch_table import Int64s, LaunchTable, Roles
from fusedadam.engine.reduction import ROWS_KNOWN, reductions
from fusedadam.rules.rule import Special
from fusedadam.rules.stages import ROUND
from fusedadam.tensors.layout import copy_with
from fusedadam.tensors.shards import sharding_of


class Amp(NamedTuple):
    """What torch.amp.GradScaler hands to a step, one float32 each: gradients are divided by the scale, and unless
    ``found_inf`` is 0 nothing is written."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def on(self, device: torch.device) -> Amp:
        wait = device.type == "cpu"  # where it is read at once
        return Amp(*(None if t is None else t.to(device, torch.float32, non_blocking=not wait) for t in self))


class Begun(NamedTuple):
    """The tensors that a launch works on, in one run: what is copied back, and the roles of each parameter."""

    roles: list[dict[str, Tensor]]
    copies: list[tuple[str, Tensor, Tensor]]  # role, original, copy


class Launch:
    """A table and the backend's prepared kernels for it. It keeps no tensors from one run to the next."""

    def __init__(self, table: LaunchTable, backend: Backend) -> None:
        self.table, self.backend = table, backend
        self._run = backend.prepare(table)
        self.needs_tensors = backend.needs_tensors or bool(table.copied)

    def begin(self, roles: Sequence[Roles]) -> Begun:
        """``roles`` of all parameters that take part; read only if ``needs_tensors``."""
        begun = Begun([dict(roles[k]) for k in self.table.members] if self.needs_tensors else [], [])
        for role, k in self.table.copied:
            original = begun.roles[k][role]
            begun.roles[k][role] = copy = copy_with(original, self.table.strides[k])
            self.table.place_one(role, k, copy.data_ptr())
            begun.copies.append((role, original, copy))
        self.table.send()
        return begun

    def run(self, position: int, begun: Begun) -> None:
        if position in self._run:
            self._run[position](begun.roles)

    def end(self, begun: Begun) -> None:
        for role, original, copy in begun.copies:
            if role in self.table.special.outputs:
                # kernels write to inference tensors in any mode; torch does so in theirs only
                with torch.inference_mode() if original.is_inference() else nullcontext():
                    original.copy_(copy)


class Launches:
    """One launch for each (device, dtypes, flags), with every kernel compiled: once made, nothing can fail."""

    def __init__(
        self,
        specials: Sequence[Special],
        roles: Sequence[Roles],
        backends: Sequence[Backend],
        groups: Sequence[int],
        wholes: Sequence[Tensor] | None = None,
        absent: Collection[int] = (),
        passing: Collection[int] = (),
    ) -> None:
        """``wholes``: what ``roles`` are this process's part of, if parameters are divided among processes.
        ``absent``: who has no gradient on this one;
        ``passing``: indices whose gradient is redistributed on every run."""
        pairs = zip(wholes or (), specials, strict=False)
        shardings = [sharding_of(whole) if special.has_sums else None for whole, special in pairs]
        members: dict[Any, list[int]] = {}
        for k, (special, own, backend) in enumerate(zip(specials, roles, backends, strict=True)):
            dtypes = tuple(own[r].dtype for r in special.roles)
            sharding = shardings[k] if shardings else None
            among = sharding and (sharding.mesh, sharding.split, k in absent)
            members.setdefault((own["param"].device, special, dtypes, backend, among), []).append(k)
        self._all = []
        for (_, special, _, backend, _), mine in members.items():
            is_absent = mine[0] in absent
            table = LaunchTable(special, mine, roles, backend.needs_tensors, wholes, shardings, is_absent, passing)
            self._all.append(Launch(table, backend))
        self._shared = self._prepare_shared(groups, [own.get("grad", own["param"]).dtype for own in roles])
        self.reductions = reductions([launch.table for launch in self])
        self._schedule = list(self._in_order())
        self.needs_tensors = any(launch.needs_tensors for launch in self)

    def __iter__(self) -> Iterator[Launch]:
        return iter(self._all)

    def __getitem__(self, k: int) -> Launch:
        return self._all[k]

    def __len__(self) -> int:
        return len(self._all)

    def set_scalars(self, scalars: Sequence[Mapping[str, Any]], whose: Int64s) -> None:
        for launch in self._all:
            if not launch.table.scalars_on_device:
                launch.table.set_scalars(scalars, whose)

    def set_amp(self, amp: Amp) -> None:
        for launch in self._all:
            launch.table.grad_scale, launch.table.found_inf = own = amp.on(launch.table.device)
            while any(t is not None for t in own) and launch.table.before_scaling:
                launch.table.before_scaling[-1]()
                launch.table.before_scaling.pop()

    def run(self, roles: Sequence[Roles], before_anything_is_written: Run = lambda: None) -> None:
        begun = [launch.begin(roles) for launch in self._all]
        before_anything_is_written()
        for run in self._schedule:
            run(begun)
        for launch, own in zip(self._all, begun, strict=True):
            launch.end(own)

    def _in_order(self) -> Iterator[Callable[[list[Begun]], None]]:
        """Stage by stage. Divided rows are known only after the other processes have been heard, and wait for that."""

        def other(run: Run) -> Callable[[list[Begun]], None]:
            return lambda _: run()

        stages = {stage.position for launch in self for stage in launch.table.special.stages}
        for position in sorted({*stages, *self._shared, *(one.position for one in self.reductions)}):
            waiting = [k for k, one in enumerate(self) if one.table.is_split and position % ROUND == ROWS_KNOWN]
            yield from (self._stage(k, position) for k in range(len(self)) if k not in waiting)
            yield from (other(one.run) for one in self.reductions if one.position == position)
            yield from (self._stage(k, position) for k in waiting)
            yield from (other(run) for run in self._shared.get(position, ()))

    def _stage(self, k: int, position: int) -> Callable[[list[Begun]], None]:
        return lambda begun: self._all[k].run(position, begun[k])

    def report(self, name: str) -> list[tuple[LaunchTable, Tensor]]:
        """A value by tensor after the step, of each table that has it."""
        tables = [launch.table for launch in self if name in launch.table.special.reports]
        return [(table, table.value(table.special.reports[name])) for table in tables]

    def _prepare_shared(self, groups: Sequence[int], dtypes: Sequence[Any]) -> dict[int, list[Run]]:
        prepared: dict[int, list[Run]] = {}
        for one in {s.name: s for launch in self for s in launch.table.special.shared}.values():
            launches: list[Launch] = []
            where: dict[int, SharedTerm] = {}
            for launch in self:
                for own in launch.table.special.shared:
                    if own.name == one.name:
                        launches.append(launch)
                        members = launch.table.members.tolist()
                        where |= {k: SharedTerm(launch.table, column, own.term) for column, k in enumerate(members)}
            parts: dict[Any, list[SharedTerm]] = {}
            for k in sorted(where):  # in the order of the parameters
                parts.setdefault((groups[k], dtypes[k]) if one.over == "group" else None, []).append(where[k])
            home = {launch.table.home for launch in launches}
            add_up = launches[0].backend.sum_across if len(home) == 1 else sum_across_devices
            prepared.setdefault(one.position, []).append(add_up(one, list(parts.values())))
        return prepared


def norm_of(launches: Launches, name: str) -> Tensor | None:
    """A norm over all parameters that the last run has left, as a tensor of its own on the first one's device."""
    for table, values in launches.report(name):
        return values[0].to(table.device, torch.float64 if table.compute == "f64" else torch.float32, copy=True)
    return None
