"""The scalars of the parameters whose steps the host counts: computed in Python, once for each group and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fusedadam.engine.geometry import Floats, Int64s
from fusedadam.engine.step_counts import Places
from fusedadam.rules.rule import HyperParameters, Rule


class HostScalars:
    """``counted``: the members whose steps the host counts, at ``places`` of the counts; ``uncounted``: members that
    have no element here, but need scalars. ``groups`` has every member's group."""

    def __init__(self, rule: Rule, groups: Int64s, counted: Int64s, places: Places, uncounted: Int64s) -> None:
        self._rule, self._groups, self.places = rule, groups, places
        self._counted, self._uncounted, self.counts_any = counted, uncounted, len(counted) > 0
        self._counted_groups, self._group_of = np.unique(groups[counted], return_inverse=True)

    def __bool__(self) -> bool:
        return self.counts_any or len(self._uncounted) > 0

    def of(self, steps: Floats, options: Sequence[HyperParameters]) -> tuple[list[Mapping[str, Any]], Int64s]:
        """The scalars of every (options, step) that occurs, and for each member which of them are its own."""
        options = [tuple(float(v) if isinstance(v, Tensor) else v for v in group) for group in options]
        if len(steps) and steps.min() == steps.max():  # as good as always: one set for each group
            keys = [(options[group], float(steps[0])) for group in self._counted_groups]
            key_of = self._group_of
        else:
            groups = self._groups[self._counted].tolist()
            keys = [(options[group], step) for group, step in zip(groups, steps.tolist(), strict=True)]
            key_of = np.arange(len(keys))
        keys += [(options[self._groups[k]], 1.0) for k in self._uncounted]  # without an element, any step will do
        scalars, order = self._rule.scalars_of(keys)
        set_of = np.zeros(len(self._groups), dtype=np.int64)
        different = len(keys) - len(self._uncounted)
        set_of[self._counted] = np.array(order[:different], dtype=np.int64)[key_of]
        set_of[self._uncounted] = order[different:]
        return scalars, set_of

    def by_member(self, steps: Floats) -> Floats:
        """The step of each member; of those without an element, 0."""
        every = np.zeros(len(self._groups))
        every[self._counted] = steps
        return every
