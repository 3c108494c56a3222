"""The scalars of a table whose step counts are on the device: computed there, by a kernel or by torch operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from torch import Tensor

from fusedadam.engine.geometry import Int64s
from fusedadam.engine.launch_table import LaunchTable
from fusedadam.engine.scalar_kernel import ScalarKernel
from fusedadam.engine.scalar_operations import ScalarOperations
from fusedadam.engine.step_counts import Places
from fusedadam.rules.rule import HyperParameters, Rule


class DeviceScalars:
    """``places`` are the positions of the parameters' counts in ``flat``; ``groups`` are the parameters' groups."""

    def __init__(self, rule: Rule, table: LaunchTable, flat: Tensor, places: Places, groups: Int64s) -> None:
        self.table, self._arguments = table, (rule, table, flat, places, groups)
        kernels = table.backend.scalars
        self._kernel = None if kernels is None else ScalarKernel(kernels, rule, table, flat, places, groups)

    def update(self, options: Sequence[HyperParameters]) -> None:
        """Writes the scalars of the next step into the table."""
        if self._kernel is None or not self._kernel.update(options):
            self._operations.update(options)

    @property
    def has_live(self) -> bool:
        return self._kernel is not None and self._kernel.has_live

    def runs_for(self, options: Sequence[HyperParameters]) -> list[Callable[..., None]] | None:
        """What ``update`` and ``count`` run, if they run nothing else with these options."""
        runs = None if self._kernel is None else self._kernel.runs_for(options)
        return None if self._kernel is None or runs is None else [*runs, self._kernel.count]

    def follow(self, options: Sequence[HyperParameters]) -> bool:
        """Whether ``update`` and ``count`` run the same with these options; numbers that have changed are sent."""
        return self._kernel is not None and self._kernel.follow(options)

    def count(self) -> None:
        """Counts the step, unless GradScaler found an infinity."""
        if self._kernel is None:
            self._operations.count()
        else:
            self._kernel.count()

    @cached_property
    def _operations(self) -> ScalarOperations:
        return ScalarOperations(*self._arguments)
