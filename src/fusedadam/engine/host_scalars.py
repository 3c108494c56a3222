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
        # which groups have members that are counted or uncounted, and which of these each member is
        served = [*((k, True) for k in counted.tolist()), *((k, False) for k in uncounted.tolist())]
        kinds = [(int(groups[k]), is_counted) for k, is_counted in served]
        order = {kind: n for n, kind in enumerate(dict.fromkeys(kinds))}
        self._kinds, self._kind_of = list(order), np.zeros(len(groups), dtype=np.int64)
        self._kind_of[[k for k, _ in served]] = [order[kind] for kind in kinds]
        self._last: tuple[Any, list[tuple[dict[str, Any], bool]], Int64s] | None = None

    def __bool__(self) -> bool:
        return self.counts_any or len(self._uncounted) > 0

    def of(self, steps: float | Floats, options: Sequence[HyperParameters]) -> tuple[list[Mapping[str, Any]], Int64s]:
        """The scalars of every (options, step) that occurs, and for each member which of them are its own. ``steps``:
        of all counted members, or of each."""
        if isinstance(steps, float):
            sets, set_of = self._sets_of_groups(options)
            return [self._rule.scalars(step=steps if counted else 1.0, **values) for values, counted in sets], set_of
        groups = self._groups[self._counted].tolist()
        keys = [(_numbers(options[group]), step) for group, step in zip(groups, steps.tolist(), strict=True)]
        keys += [(_numbers(options[self._groups[k]]), 1.0) for k in self._uncounted]
        scalars, order = self._rule.scalars_of(keys)
        set_of = np.zeros(len(self._groups), dtype=np.int64)
        set_of[np.concatenate([self._counted, self._uncounted])] = order
        return scalars, set_of

    def _sets_of_groups(self, options: Sequence[HyperParameters]) -> tuple[list[tuple[dict[str, Any], bool]], Int64s]:
        """The hyper-parameters of each kind, with whether they are of members that are counted (without an element, any
        step will do), and for each member which of them are its own. Most steps have the options of the last one."""
        if self._last is not None and self._last[0] is options:
            return self._last[1:]
        keys = [(_numbers(options[group]), counted) for group, counted in self._kinds]
        sets = [(dict(zip(self._rule.hyper_parameters, values, strict=True)), counted) for values, counted in keys]
        # a tensor may change in place
        are_numbers = all(key[0] is options[kind[0]] for key, kind in zip(keys, self._kinds, strict=True))
        self._last = (options, sets, self._kind_of) if are_numbers else None
        return sets, self._kind_of

    def by_member(self, steps: float | Floats) -> Floats:
        """The step of each member; of those without an element, 0."""
        every = np.zeros(len(self._groups))
        every[self._counted] = steps
        return every


def _numbers(options: HyperParameters) -> HyperParameters:
    """The same tuple, if no tensor is among them."""
    for value in options:
        if isinstance(value, Tensor):
            return tuple([float(v) if isinstance(v, Tensor) else v for v in options])
    return options
