"""The scalars of a table whose step counts only the device knows: made there, by torch's own operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusedadam.engine.geometry import Int64s
from fusedadam.engine.launch_table import LaunchTable
from fusedadam.engine.step_counts import Places
from fusedadam.rules.counts import DeviceCount, PowerTables
from fusedadam.rules.rule import Rule
from fusedadam.rules.tracing import MAY_BE_ON_DEVICE
from fusedadam.tensors.transfer import sent

# What groups differ in most: one value for each parameter. Whatever else they differ in is calculated group by group.
VARYING = MAY_BE_ON_DEVICE


class DeviceScalars:
    """``places``: where in ``flat`` the counts of the table's parameters are; ``groups``: whose options they have."""

    def __init__(self, rule: Rule, table: LaunchTable, flat: Tensor, places: Places, groups: Int64s) -> None:
        self.table, self._rule, self._flat, self._groups = table, rule, flat, groups
        self._places = None if isinstance(places, slice) else sent(places, table.home)
        self._rows = {name: table.value(name) for name in table.scalars}
        self._next = torch.empty(len(table.members), dtype=torch.float64, device=table.home)
        self._tables = PowerTables()
        self._filled: dict[tuple[str, int], float] = {}  # rows of numbers that stay the same
        self._seen: Any = None
        self._parts: list[tuple[Tensor | None, dict[str, Any]]] = []

    def update(self, options: Sequence[tuple[Any, ...]]) -> None:
        """The scalars of the steps after those that have been counted."""
        seen = [tuple(id(v) if isinstance(v, Tensor) else v for v in own) for own in options]
        if seen != self._seen:
            self._parts, self._seen = list(self._divide(options)), seen
            self._filled.clear()
        counted = self._flat if self._places is None else self._flat.take(self._places)
        step = torch.add(counted, 1, out=self._next)
        for part, (columns, own) in enumerate(self._parts):
            now = {name: value() if isinstance(value, Live) else value for name, value in own.items()}
            mine = DeviceCount(step if columns is None else step[columns], self._tables)
            scalars = self._rule.scalars(step=mine, **now)
            for name in self.table.scalars:
                self._write(name, part, columns, scalars[name])
        self._tables.end_step()

    def count(self) -> None:
        """The step is taken, unless there is an infinity."""
        found_inf = self.table.found_inf
        one = 1 if found_inf is None else found_inf.view(-1) == 0
        if self._places is None:
            self._flat.add_(one)
        else:
            self._flat[self._places] += one

    def _write(self, name: str, part: int, columns: Tensor | None, value: Any) -> None:
        row = self._rows[name]
        if isinstance(value, Tensor):
            if columns is None:
                row.copy_(value)
            else:
                row[columns] = value.expand(len(columns))
        elif self._filled.get((name, part)) != float(value):
            if columns is None:
                row.fill_(float(value))
            else:
                row.index_fill_(0, columns, float(value))
            self._filled[name, part] = float(value)

    def _divide(self, options: Sequence[tuple[Any, ...]]) -> Any:
        """For parameters with the same options, but for those that vary: their columns (None: all), and the options."""
        names = self._rule.hyper_parameters
        alike: dict[tuple[Any, ...], list[int]] = {}
        for group in dict.fromkeys(self._groups.tolist()):
            fixed = tuple(v for n, v in zip(names, options[group], strict=True) if n not in VARYING)
            alike.setdefault(fixed, []).append(group)
        for groups in alike.values():
            mine = np.flatnonzero(np.isin(self._groups, groups))
            columns = None if len(mine) == len(self._groups) else sent(mine, self.table.home)
            own = dict(zip(names, options[groups[0]], strict=True))
            for name in VARYING:
                if name in own:
                    own[name] = self._each([options[g][names.index(name)] for g in groups], groups, mine)
            yield columns, own

    def _each(self, values: list[Any], groups: list[int], mine: Int64s) -> Any:
        """One value for all, or one for each column."""
        live = any(isinstance(value, Tensor) for value in values)
        same = all(value is values[0] for value in values) or (not live and len(set(values)) == 1)
        order = {group: k for k, group in enumerate(groups)}
        which = None if same else np.array([order[g] for g in self._groups[mine].tolist()])
        if live:
            return Live(values, None if which is None else sent(which, self.table.home), self.table.home)
        return values[0] if which is None else sent(np.array(values, dtype=np.float64)[which], self.table.home)


class Live(NamedTuple):
    """Values of which some are tensors, whose owner may change them at any time."""

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
