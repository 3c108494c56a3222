"""The options of an optimizer's groups, read anew in every step: anybody may change them at any time.

Most steps find what the last one found, which is told by identity alone. Where something changed, what changed is
checked as when the optimizer was made, before anything is written.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from fusedadam.tracing import MAY_BE_ON_DEVICE

Group: TypeAlias = dict[str, Any]
Flags: TypeAlias = tuple[bool, ...]
Options: TypeAlias = tuple[Any, ...]  # the hyper-parameters of a group, in the order of the rule's scalars
NOT_OPTIONS = ("params", "param_names")


class Source(NamedTuple):
    """Where flags and hyper-parameters come from: ``option(group, name)``; ``check(group, changed)`` raises."""

    flags: Sequence[str]
    hyper_parameters: Sequence[str]
    option: Callable[[Group, str], Any]
    check: Callable[[Group, Sequence[str]], None]


class GroupOptions:
    """The flags and hyper-parameters of each group."""

    def __init__(self) -> None:
        self.flags: list[Flags] = []
        self.options: list[Options] = []
        self._seen: list[list[Any]] = []  # keys and values of each group
        self._checked: list[dict[str, Any]] = []  # what the values were when they were checked
        self._live: list[set[str]] = []  # options that may change without becoming other objects

    def read(self, groups: Sequence[Group], source: Source) -> None:
        if len(groups) != len(self._seen):
            count = len(groups)
            self.flags, self.options, self._seen = [()] * count, [()] * count, [[] for _ in groups]
            self._checked, self._live = [{} for _ in groups], [set() for _ in groups]
        for k, group in enumerate(groups):
            now, seen = [*group, *group.values()], self._seen[k]
            if self._live[k] or len(now) != len(seen) or not all(map(operator.is_, now, seen)):
                self._take(k, group, now, source)

    def _take(self, k: int, group: Group, now: list[Any], source: Source) -> None:
        names = [name for name in self._others(k, group, now) if name not in NOT_OPTIONS]
        values = {name: _value(name, group[name]) for name in names}
        checked = self._checked[k]
        changed = [name for name in names if name not in checked or not _same(values[name], checked[name])]
        if changed:
            source.check(group, changed)
        if changed or len(now) != len(self._seen[k]):
            self.flags[k] = tuple(bool(source.option(group, name)) for name in source.flags)
            self.options[k] = tuple(_number(name, source.option(group, name)) for name in source.hyper_parameters)
        checked.update(values)
        self._live[k] = {name for name in {*self._live[k], *names} if name in group and _may_change(group[name])}
        self._seen[k] = now

    def _others(self, k: int, group: Group, now: list[Any]) -> list[str]:
        """The options that may be others than before."""
        seen, keys = self._seen[k], list(group)
        if len(now) != len(seen) or seen[: len(keys)] != keys:
            return keys
        values = zip(keys, now[len(keys) :], seen[len(keys) :], strict=True)
        return [name for name, value, before in values if value is not before or name in self._live[k]]


def readable(group: Group) -> Group:
    """The group with options that are only known to a device left out of the question: no check waits for one."""
    return {
        name: 0.0 if name in MAY_BE_ON_DEVICE and _is_elsewhere(value) else value for name, value in dict(group).items()
    }


def _value(name: str, value: Any) -> Any:
    """An option as it is now: a tensor by its value where reading it does not wait for a device."""
    if isinstance(value, (list, tuple)):
        return tuple(_value("", each) for each in value)
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type != "meta":
        return value if name in MAY_BE_ON_DEVICE and _is_elsewhere(value) else value.item()
    return value


def _number(name: str, value: Any) -> Any:
    """A hyper-parameter as scalars get it; what may be on a device stays there."""
    if isinstance(value, str) or (name in MAY_BE_ON_DEVICE and _is_elsewhere(value)):
        return value
    return float(value)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    return a is b or (type(a) is type(b) and bool(a == b))


def _is_elsewhere(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type not in ("cpu", "meta") and value.numel() == 1


def _may_change(value: Any) -> bool:
    """Without becoming another object."""
    return isinstance(value, (Tensor, list)) or (isinstance(value, tuple) and any(map(_may_change, value)))
