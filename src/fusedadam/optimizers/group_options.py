"""The options of an optimizer's groups, read anew in every step: anybody may change them at any time.

Most steps find what the last one found, which is told by identity alone. Where something changed, what changed is
checked as when the optimizer was made, before anything is written.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from fusedadam.rules.rule import Options
from fusedadam.rules.tracing import MAY_BE_ON_DEVICE

LARGEST_ROUNDING_ERROR = 1e-12  # of a learning rate that should be 0

Group: TypeAlias = dict[str, Any]
Flags: TypeAlias = tuple[bool, ...]


class Source(NamedTuple):
    """Where flags and hyper-parameters come from: ``option(group, name)``; ``check(group, changed)`` raises. ``names``:
    the options there are; whatever else is in a group belongs to its owner."""

    names: Container[str]
    flags: Sequence[str]
    hyper_parameters: Sequence[str]
    option: Callable[[Group, str], Any]
    check: Callable[[Group, Sequence[str]], None]


class Known(NamedTuple):
    """What was found in a group."""

    flags: Flags
    options: Options
    seen: list[Any]  # keys and values
    checked: Mapping[str, Any]  # what the values were when they were checked
    live: frozenset[str]  # options that may change without becoming other objects


NOTHING = Known((), (), [], {}, frozenset())


class GroupOptions:
    """The flags and hyper-parameters of each group."""

    def __init__(self) -> None:
        self._known: list[Known] = []

    def read(self, groups: Sequence[Group], source: Source) -> tuple[list[Flags], list[Options]]:
        if len(groups) != len(self._known):
            self._known = [NOTHING] * len(groups)
        for k, group in enumerate(groups):
            now, known = [*group, *group.values()], self._known[k]
            if known.live or len(now) != len(known.seen) or not all(map(operator.is_, now, known.seen)):
                self._known[k] = _found(group, now, known, source)
        return [known.flags for known in self._known], [known.options for known in self._known]


def _found(group: Group, now: list[Any], known: Known, source: Source) -> Known:
    keys, seen = list(group), known.seen
    same_keys = len(now) == len(seen) and seen[: len(keys)] == keys
    before = known.checked if same_keys else {}
    pairs = zip(keys, now[len(keys) :], seen[len(keys) :] if same_keys else now, strict=False)
    others = [name for name, value, last in pairs if not same_keys or value is not last or name in known.live]
    values = {name: _value(name, group[name]) for name in others if name in source.names}
    changed = [n for n, v in values.items() if n not in known.checked or not _same(v, known.checked[n])]
    if changed:
        source.check(group, changed)
    flags, options = known.flags, known.options
    if changed or not same_keys:
        flags = tuple(bool(source.option(group, name)) for name in source.flags)
        options = tuple(_number(name, source.option(group, name)) for name in source.hyper_parameters)
    live = frozenset(name for name in {*known.live, *values} if name in group and _may_change(group[name]))
    return Known(flags, options, now, {**before, **values}, live)


def readable(group: Group) -> Group:
    """The group as it is checked: no check waits for a device, or minds a rounding error."""
    now = {n: 0.0 if n in MAY_BE_ON_DEVICE and _is_elsewhere(v) else v for n, v in dict(group).items()}
    return {**now, "lr": without_rounding_error(now["lr"])} if "lr" in now else now


def without_rounding_error(lr: Any) -> Any:
    """Schedulers may miss 0 by a rounding error, as LinearLR(end_factor=0) does; torch goes on with what they set."""
    value = lr.item() if isinstance(lr, Tensor) and lr.numel() == 1 and lr.device.type == "cpu" else lr
    return 0.0 if isinstance(value, float) and -LARGEST_ROUNDING_ERROR <= value < 0 else lr


def only_known_there(group: Group) -> list[str]:
    """The options of which a value is on a device, not on the host."""

    def elsewhere(value: Any) -> bool:
        return any(map(elsewhere, value)) if isinstance(value, (list, tuple)) else _is_elsewhere(value)

    return [name for name, value in group.items() if name != "params" and elsewhere(value)]


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
    if a is b or isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    try:
        return type(a) is type(b) and bool(a == b)
    except (RuntimeError, TypeError, ValueError):  # things that have no one answer, such as arrays
        return False


def _is_elsewhere(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type not in ("cpu", "meta") and value.numel() == 1


def _may_change(value: Any) -> bool:
    """Without becoming another object."""
    return isinstance(value, (Tensor, list)) or (isinstance(value, tuple) and any(map(_may_change, value)))
