"""Launches: what a step runs, stage by stage, over all parameters that take part in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fusedadam import checks
from fusedadam.engine.backend import Action, Backend, Joined, SharedTerm, sum_across_devices
from fusedadam.engine.changes.snapshot import Snapshot
from fusedadam.engine.geometry import Floats, Int64s
from fusedadam.engine.launch_table import LaunchTable
from fusedadam.engine.member import Member, Roles
from fusedadam.engine.products import Batch, Products
from fusedadam.engine.reduction import reductions
from fusedadam.rules.positions import Phase, Position
from fusedadam.tensors.layout import copy_with


class Amp(NamedTuple):
    """What torch.amp.GradScaler hands to a step, one float32 each. Gradients are divided by ``grad_scale`` and stored
    unscaled, as torch's fused optimizers do. If ``found_inf`` is given and not 0, the step writes nothing."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    @property
    def is_on_device(self) -> bool:
        return any(t is not None and t.device.type != "cpu" for t in self)

    def on(self, device: torch.device) -> Amp:
        if self.grad_scale is None and self.found_inf is None:  # in most steps
            return self
        wait = device.type == "cpu"  # where it is read at once
        return Amp(*(None if t is None else t.to(device, torch.float32, non_blocking=not wait) for t in self))


NO_AMP = Amp()


class Run(NamedTuple):
    """The tensors of one run of a launch: the roles of each member, and the copies that are written back."""

    roles: list[dict[str, Tensor]]
    copies: list[tuple[str, Tensor, Tensor]]  # role, original, copy


WITHOUT_TENSORS = Run([], [])
Scheduled: TypeAlias = tuple[Callable[..., None], "int | None"]  # the launch whose tensors it is handed, if any


class Turn(IntEnum):
    """When a stage of a launch runs."""

    WITH_ALL = 0  # stage by stage with the other launches of the step
    OPERANDS = 1  # with its batch, which stores the operands of a product
    RESULTS = 2  # with its batch, after the product


class Launch:
    """A table and the backend's prepared kernels for it. It keeps no tensors from one run to the next."""

    def __init__(self, table: LaunchTable, backend: Backend) -> None:
        self.table, self.backend = table, backend
        self.stages = dict(backend.prepare(table))
        self.product = table.specialized.product
        self.needs_tensors = backend.needs_tensors or bool(table.copied)

    def runs_at(self, position: Position) -> bool:
        """Without a gradient here, states stay as they are."""
        if position not in self.stages:
            return False
        if not self.table.is_absent:
            return True
        stage = next(stage for stage in self.table.specialized.stages if stage.position == position)
        return stage.space == "element" or not any(name in self.table.formats for name in stage.arrays)

    def turn_of(self, position: Position) -> Turn:
        if self.product is None or position < self.product.position:
            return Turn.WITH_ALL
        return Turn.OPERANDS if position < Position(self.product.position.round, Phase.PRODUCTS) else Turn.RESULTS

    def begin(self, roles: Sequence[Roles]) -> Run:
        """``roles`` of all members of the step; read only if ``needs_tensors``."""
        if not self.needs_tensors:
            self.table.send()
            return WITHOUT_TENSORS
        run = Run([dict(roles[k]) for k in self.table.member_indices], [])
        for role, k in self.table.copied:
            original = run.roles[k][role]
            run.roles[k][role] = copy = copy_with(original, self.table.strides_of(role, k, original))
            self.table.place_one(role, k, copy.data_ptr())
            run.copies.append((role, original, copy))
        self.table.send()
        return run

    def end(self, run: Run) -> None:
        for role, original, copy in run.copies:
            if self.table.is_written(role) and not original._is_zerotensor():  # zeros stay zeros, without memory
                # kernels write to inference tensors in any mode; torch does so in theirs only
                with torch.inference_mode() if original.is_inference() else nullcontext():
                    original.copy_(copy)


class Launches:
    """One launch for each launch key, or several where matrices are multiplied, with every kernel compiled: once made,
    nothing can fail. Only kernels for scaled gradients are compiled later, by the first scaled step, before it writes
    anything."""

    def __init__(self, members: Sequence[Member]) -> None:
        checks.new_tensors("param")
        products = Products(members)
        self._all = [
            Launch(LaunchTable(indices, members, own.operands, products.batch_of(k)), members[indices[0]].backend)
            for k, (indices, own) in enumerate(zip(products.members_of, products.memory, strict=True))
        ]
        self.batches = products.batches(self._all)
        self._shared = self._prepare_shared(members)
        self.reductions = reductions([launch.table for launch in self])
        self._schedule = list(self._in_order())
        self._joined = self.join([])
        self._amp = NO_AMP  # of the last run
        self.needs_tensors = any(launch.needs_tensors for launch in self)
        self.is_stochastic = any(launch.table.is_stochastic for launch in self)

    def join(self, first: Sequence[Callable[..., None]], is_scaled: bool = False) -> Joined | None:
        """One function that runs ``first`` and then all stages, where the backend can."""
        join = self._all[0].backend.join if self._all else None
        return None if join is None else join([*first, *(action for action, _ in self._schedule)], is_scaled)

    def send(self) -> None:
        """Takes what changed on the host to the device."""
        for launch in self._all:
            launch.table.send()

    def __iter__(self) -> Iterator[Launch]:
        return iter(self._all)

    def __getitem__(self, k: int) -> Launch:
        return self._all[k]

    def __len__(self) -> int:
        return len(self._all)

    def execute(self, roles: Sequence[Roles], amp: Amp = NO_AMP, count: Action = lambda: None) -> None:
        """Runs all stages with the scalars that were set. ``roles`` are read only if ``needs_tensors``. ``count`` is
        called when nothing can fail anymore, just before the first write."""
        self.set_amp(amp)
        runs = [launch.begin(roles) for launch in self._all]
        count()
        if self._joined is not None and amp is NO_AMP:
            self._joined(0)
        else:
            for action, k in self._schedule:
                if k is None:
                    action()
                else:
                    action(runs[k].roles)
        if self.needs_tensors:
            for launch, run in zip(self, runs, strict=True):
                launch.end(run)

    @property
    def need_host_scalars(self) -> bool:
        """Whether the scalars of some launch are not computed on its device."""
        for launch in self._all:  # noqa: SIM110  faster than any()
            if not launch.table.scalars_on_device:
                return True
        return False

    def set_scalars(self, scalars: Sequence[Mapping[str, Any]], set_of: Int64s) -> None:
        """``scalars`` are the sets that differ; ``set_of[k]`` is the set of the k-th member."""
        for launch in self:
            if not launch.table.scalars_on_device:
                launch.table.set_scalars(scalars, set_of)

    def set_steps(self, steps: Floats) -> None:
        """``steps[k]``: the number of the k-th member's step."""
        for launch in self:
            if launch.table.is_stochastic and not launch.table.scalars_on_device:
                launch.table.set_steps(steps[launch.table.member_indices])

    def set_amp(self, amp: Amp) -> None:
        if amp is NO_AMP and self._amp is NO_AMP:
            return
        self._amp = amp
        for launch in self:
            table = launch.table
            table.grad_scale, table.found_inf = amp.on(table.device)
            while table.compile_scaled and (table.grad_scale is not None or table.found_inf is not None):
                table.compile_scaled[-1]()
                table.compile_scaled.pop()  # only now: it may have been interrupted

    def _in_order(self) -> Iterator[Scheduled]:
        """What runs, and the launch whose tensors it is handed, if any: stage by stage, and from the operands of a
        product on, batch by batch, which share memory."""
        yield from self._stage_by_stage(None, lambda launch, at: launch.turn_of(at) == Turn.WITH_ALL)
        for batch in self.batches:
            if batch.exchange is None:
                yield from self._until_product(batch)
                yield from batch.multiply
                yield from self._after_product(batch)
        # each is on its way while the one before it is multiplied, and on its way back while the one after it is,
        # unless that begins with an all-reduce, which waits for it
        exchanged = [(batch, batch.exchange) for batch in self.batches if batch.exchange is not None]
        for k in range(len(exchanged) + 2):
            for batch, exchange in exchanged[k : k + 1]:
                yield from self._until_product(batch)
                yield exchange.send, None
            for _, exchange in exchanged[max(0, k - 1) : k]:
                yield exchange.multiply, None
            for batch, exchange in exchanged[max(0, k - 2) : max(0, k - 1)]:
                yield exchange.receive, None
                yield from self._after_product(batch)

    def _until_product(self, batch: Batch) -> Iterator[Scheduled]:
        return self._stage_by_stage(batch, lambda launch, at: launch.turn_of(at) == Turn.OPERANDS)

    def _after_product(self, batch: Batch) -> Iterator[Scheduled]:
        return self._stage_by_stage(batch, lambda launch, at: launch.turn_of(at) == Turn.RESULTS)

    def _stage_by_stage(self, batch: Batch | None, is_due: Callable[[Launch, Position], bool]) -> Iterator[Scheduled]:
        """Of all launches, or of a batch. Rows that are sharded themselves are known only after an all-reduce, and wait
        for it."""
        launches = range(len(self)) if batch is None else batch.launches
        shared = self._shared if batch is None else {}
        reductions = [one for one in self.reductions if one.batch == (None if batch is None else batch.number)]
        if batch is not None:
            reductions = [
                one for one in reductions if one.batch is not None and is_due(self[launches[0]], one.position)
            ]
        positions = {at for k in launches for at in self[k].stages if is_due(self[k], at)}
        for position in sorted({*positions, *shared, *(reduction.position for reduction in reductions)}):
            having = [k for k in launches if self[k].runs_at(position) and is_due(self[k], position)]
            waiting = [k for k in having if self[k].table.splits_rows and position.phase == Phase.ROW]
            yield from ((self[k].stages[position], k) for k in having if k not in waiting)
            yield from ((reduction.run, None) for reduction in reductions if reduction.position == position)
            yield from ((self[k].stages[position], k) for k in waiting)
            yield from ((action, None) for action in shared.get(position, ()))

    def report(self, name: str) -> list[tuple[LaunchTable, Tensor]]:
        """A value by tensor after the step, of each table that has it."""
        tables = [launch.table for launch in self if name in launch.table.specialized.reports]
        return [(table, table.value(table.specialized.reports[name])) for table in tables]

    def _prepare_shared(self, members: Sequence[Member]) -> dict[Position, list[Action]]:
        """The sums over groups, or over all parameters: each is added up when every launch has its terms."""
        prepared: dict[Position, list[Action]] = {}
        for summation in {s.name: s for launch in self for s in launch.table.specialized.shared}.values():
            terms: dict[int, SharedTerm] = {}
            launches = [
                launch for launch in self if summation.name in (s.name for s in launch.table.specialized.shared)
            ]
            for launch in launches:
                term = next(s.term for s in launch.table.specialized.shared if s.name == summation.name)
                columns = enumerate(launch.table.member_indices.tolist())
                terms |= {k: SharedTerm(launch.table, column, term) for column, k in columns}
            term_lists: dict[Any, list[SharedTerm]] = {}
            for k in sorted(terms):  # in the order of the parameters
                roles = members[k].roles
                group = (members[k].group, roles.get("grad", roles["param"]).dtype)
                term_lists.setdefault(group if summation.over == "group" else None, []).append(terms[k])
            one_home = len({launch.table.home for launch in launches}) == 1
            add_up = launches[0].backend.sum_across if one_home else sum_across_devices
            prepared.setdefault(summation.position, []).append(add_up(summation, list(term_lists.values())))
        return prepared


class PlacedLaunches:
    """``slots_of[k]``: the slot of the snapshot for each array of the k-th member, such as
    ``{"param": 0, "grad": 1, "exp_avg": 2}``; empty if the member is absent."""

    def __init__(self, launches: Launches, snapshot: Snapshot, slots_of: Sequence[Mapping[str, int]]) -> None:
        self.launches, self.snapshot, self.slots_of = launches, snapshot, slots_of
        self._address_slots = [  # of each table, [arrays, members]
            (table, np.array([[slots_of[k][name] for k in table.member_indices.tolist()] for name in table.arrays]))
            for table in (launch.table for launch in launches)
            if not table.is_absent
        ]

    def place(self) -> None:
        """Takes the present addresses from the snapshot to the tables."""
        for table, slots in self._address_slots:
            table.place(self.snapshot.addresses[slots])


def increment_versions(written: Sequence[Tensor]) -> None:
    """As every in-place operation does, so that autograd refuses to go back through a graph that kept them."""
    torch.autograd.graph.increment_version(written)


def norm_of(launches: Launches, name: str) -> Tensor | None:
    """A norm over all parameters that the last run has left, as a tensor of its own on the first one's device."""
    for table, values in launches.report(name):
        return values[0].to(table.device, torch.float64 if table.compute == "f64" else torch.float32, copy=True)
    return None
