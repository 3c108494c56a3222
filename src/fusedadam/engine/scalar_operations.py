"""Scalars on the device by torch operations: for any device, and the definition of what a kernel computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusedadam.engine.geometry import Int64s
from fusedadam.engine.launch_table import STEP, LaunchTable
from fusedadam.engine.step_counts import Places
from fusedadam.rules.counts import DeviceCount, PowerTables
from fusedadam.rules.rule import Rule
from fusedadam.rules.tracing import MAY_BE_ON_DEVICE
from fusedadam.tensors.transfer import sent

# Options that often differ between groups: one value per parameter. If others differ, groups are computed separately.
VARYING = MAY_BE_ON_DEVICE


class ScalarOperations:
    """``places`` are the positions of the parameters' counts in ``flat``; ``groups`` are the parameters' groups."""

    def __init__(self, rule: Rule, table: LaunchTable, flat: Tensor, places: Places, groups: Int64s) -> None:
        self.table, self._rule, self._flat, self._groups = table, rule, flat, groups
        self._places = None if isinstance(places, slice) else sent(places, table.home)
        self._scalars = {name: table.value(name) for name in table.scalars}
        self._next = torch.empty(len(table.member_indices), dtype=torch.float64, device=table.home)
        self._tables = PowerTables()
        self._filled: dict[tuple[str, int], float] = {}  # by scalar and batch: the number that the table already holds
        self._seen: Any = None  # the options that the batches were made from
        self._batches: list[tuple[Tensor | None, dict[str, Any]]] = []

    def update(self, options: Sequence[tuple[Any, ...]]) -> None:
        """Writes the scalars of the next step into the table."""
        seen = [tuple(id(v) if isinstance(v, Tensor) else v for v in group_options) for group_options in options]
        if seen != self._seen:
            self._batches, self._seen = list(self._make_batches(options)), seen
            self._filled.clear()
        counted = self._flat if self._places is None else self._flat.take(self._places)
        step = torch.add(counted, 1, out=self._next)
        if self.table.is_stochastic:
            self.table.on_device[self.table.fields[STEP]].copy_(step)
        for batch, (columns, hyper_parameters) in enumerate(self._batches):
            now = {name: value() if isinstance(value, Live) else value for name, value in hyper_parameters.items()}
            count = DeviceCount(step if columns is None else step[columns], self._tables)
            scalars = self._rule.scalars(step=count, **now)
            for name in self.table.scalars:
                self._write(name, batch, columns, scalars[name])
        self._tables.end_step()

    def count(self) -> None:
        """Counts the step, unless GradScaler found an infinity."""
        found_inf = self.table.found_inf
        taken = 1 if found_inf is None else found_inf.view(-1) == 0
        if self._places is None:
            self._flat.add_(taken)
        else:
            self._flat[self._places] += taken

    def _write(self, name: str, batch: int, columns: Tensor | None, value: Any) -> None:
        scalar = self._scalars[name]
        if isinstance(value, Tensor):
            if columns is None:
                scalar.copy_(value)
            else:
                scalar[columns] = value.expand(len(columns))
        elif self._filled.get((name, batch)) != float(value):
            if columns is None:
                scalar.fill_(float(value))
            else:
                scalar.index_fill_(0, columns, float(value))
            self._filled[name, batch] = float(value)

    def _make_batches(self, options: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Tensor | None, dict[str, Any]]]:
        """Parameters whose options are equal except for VARYING: their columns (None: all), and the options."""
        names = self._rule.hyper_parameters
        alike: dict[tuple[Any, ...], list[int]] = {}
        for group in dict.fromkeys(self._groups.tolist()):
            fixed = tuple(v for n, v in zip(names, options[group], strict=True) if n not in VARYING)
            alike.setdefault(fixed, []).append(group)
        for groups in alike.values():
            members = np.flatnonzero(np.isin(self._groups, groups))
            columns = None if len(members) == len(self._groups) else sent(members, self.table.home)
            hyper_parameters = dict(zip(names, options[groups[0]], strict=True))
            for name in VARYING:
                if name in hyper_parameters:
                    values = [options[g][names.index(name)] for g in groups]
                    hyper_parameters[name] = self._varying(values, groups, members)
            yield columns, hyper_parameters

    def _varying(self, values: list[Any], groups: list[int], members: Int64s) -> Any:
        """The groups' values of an option: a single value if they are equal, else one for each member."""
        live = any(isinstance(value, Tensor) for value in values)
        same = all(value is values[0] for value in values) or (not live and len(set(values)) == 1)
        order = {group: k for k, group in enumerate(groups)}
        which = None if same else np.array([order[g] for g in self._groups[members].tolist()])
        if live:
            return Live(values, None if which is None else sent(which, self.table.home), self.table.home)
        return values[0] if which is None else sent(np.array(values, dtype=np.float64)[which], self.table.home)


class Live(NamedTuple):
    """Values of which some are tensors, which the user may change in place; ``which`` selects one for each member."""

    values: list[Any]
    which: Tensor | None
    home: torch.device

    def __call__(self) -> Tensor:
        if self.which is None:
            return self._now(self.values[0])
        return torch.stack([self._now(value) for value in self.values])[self.which]

    def _now(self, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().to(self.home, torch.float64).reshape(())
        return torch.full((), value, dtype=torch.float64, device=self.home)
