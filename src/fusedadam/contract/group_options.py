"""The options of an optimizer's groups, read in every step: a scheduler or a user may change them at any time.

Most steps find the same objects as the last step, and reading them is one comparison by identity. Options that have
changed are checked as when the optimizer was made, before anything is written.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from fusedadam import checks
from fusedadam.contract import refusals, storage
from fusedadam.contract.class_checks import WITHOUT_EFFECT, Recorded, check_effects
from fusedadam.contract.declarations import Group, is_on_device
from fusedadam.engine.scalars import Flags, Options
from fusedadam.rules.newton_schulz import NewtonSchulz, checked
from fusedadam.rules.rule import HyperParameters
from fusedadam.rules.tracing import MAY_BE_ON_DEVICE

if TYPE_CHECKING:
    from fusedadam.contract.base import FusedOptimizer

LARGEST_ROUNDING_ERROR = 1e-12  # of a learning rate that should be 0


class Reading(NamedTuple):
    """What was read from a group."""

    flags: Flags
    hyper_parameters: HyperParameters
    plan: Any  # flags, storage, backend, offload and kind of iteration, which a plan depends on
    seen: list[Any]  # keys, then values
    checked: Mapping[str, Any]  # each option's value when it was checked
    mutable: frozenset[str]  # options that may change without becoming another object
    skips_nonfinite: bool
    on_device: bool  # steps are counted, or a hyper-parameter is, on the device
    structure: int  # another number whenever ``plan`` has changed
    lr_at: int | None  # which hyper-parameter is the learning rate; None if others, or checks, follow from it
    lr_seen_at: int | None  # where its value is among ``seen``; None if it cannot change alone


def method_of(optimizer: type[FusedOptimizer], group: Group) -> NewtonSchulz:
    """How matrices of a group are orthogonalized."""
    return checked(optimizer.newton_schulz(group), f"{optimizer.__name__}.newton_schulz(group)")


UNREAD = Reading((), (), None, [], {}, frozenset(), False, False, 0, None, None)


class GroupOptions:
    """The flags and hyper-parameters of each group, as an optimizer class declares them."""

    def __init__(self, optimizer: type[FusedOptimizer]) -> None:
        self._optimizer = optimizer
        self._readings: list[Reading] = []
        self._last: Options | None = None
        self._revisions = itertools.count(1)
        self._checks_lr = True  # whether a check of other options also asks for the learning rate

    def read(self, groups: Sequence[Group]) -> Options:
        """The very same object as the last time if no option has changed."""
        if len(groups) != len(self._readings):
            self._last = None
            self._readings = [UNREAD] * len(groups)
        for k, group in enumerate(groups):
            now, last = [*group, *group.values()], self._readings[k]
            if last.mutable or len(now) != len(last.seen) or not all(map(operator.is_, now, last.seen)):
                reading = self._scheduled(now, last) or self._read(group, now, last)
                if reading is not last:
                    self._last = None  # first: this may be interrupted
                    self._readings[k] = reading
        if self._last is None:
            read = self._readings
            self._last = Options(
                [r.flags for r in read],
                [r.hyper_parameters for r in read],
                any(r.skips_nonfinite for r in read),
                any(r.on_device for r in read),
                max([r.structure for r in read], default=0),  # the last one that has changed
                next(self._revisions),
            )
        return self._last

    def _read(self, group: Group, now: list[Any], last: Reading) -> Reading:
        count, declared = len(group), self._optimizer
        names, values, seen = now[:count], now[count:], last.seen[count:]
        same_keys = len(now) == len(last.seen) and names == last.seen[:count]
        if same_keys:
            names = [*itertools.compress(names, map(operator.is_not, values, seen)), *last.mutable]
        found = {name: _value(name, group[name]) for name in names if name in declared.options}
        changed = [n for n, v in found.items() if n not in last.checked or not _same(v, last.checked[n])]
        if changed:
            self._check_changed(group, changed)
        elif same_keys and all(map(operator.is_, values, seen)):
            return last
        new = self._derived(group, last, same_keys) if changed or not same_keys else last
        mutable = [n for n in (*last.mutable, *found) if n in group and _is_mutable(group[n])]
        return new._replace(
            seen=now,
            checked={**last.checked, **found} if same_keys else found,
            mutable=frozenset(mutable),
            skips_nonfinite=bool(group.get("skip_nonfinite")),
            lr_seen_at=None if new.lr_at is None or mutable or "lr" not in group else count + now.index("lr"),
        )

    def _derived(self, group: Group, last: Reading, same_keys: bool) -> Reading:
        """What follows from options that have changed: flags, hyper-parameters, and what plans depend on."""
        recorded: Any = Recorded(group)
        declared, needed = self._optimizer, self._optimizer.rule.hyper_parameters
        flags = tuple([bool(declared.value(recorded, name)) for name in declared._flags])
        others = {n: _number(n, declared.value(recorded, n)) for n in needed if n != "lr"}
        if not same_keys:
            together: Any = Recorded(for_check(group))
            declared.check(together, ())  # a class may check options against each other
            self._checks_lr = "lr" in together.asked
        is_alone = not self._checks_lr and "lr" not in recorded.asked and "lr" not in declared.derived
        if any(name in group and name not in recorded.asked for name in WITHOUT_EFFECT):
            check_effects(declared, group)
        options = tuple([others[n] if n != "lr" else _number(n, declared.value(group, n)) for n in needed])
        place = group.get("backend"), group.get("offload")
        plan = flags, storage.key(declared, group), place, method_of(declared, group)
        is_other = plan != last.plan
        if is_other and group.get("storage") is not None and not declared.__module__.startswith("fusedadam."):
            refusals.check_signs(declared, flags, options)
        return last._replace(
            flags=flags,
            hyper_parameters=options,
            plan=plan,
            on_device=bool(group.get("capturable")) or any(map(is_on_device, options)),
            structure=next(self._revisions) if is_other else last.structure,
            lr_at=needed.index("lr") if "lr" in needed and is_alone else None,
        )

    def _scheduled(self, now: list[Any], last: Reading) -> Reading | None:
        """A short way for what most schedulers do in every step: another learning rate, and nothing else."""
        flags, before, plan, seen, checked, mutable, skips, on_device, structure, k, at = last
        if at is None or k is None or len(now) != len(seen):
            return None
        lr = now[at]
        if type(lr) is not float or not 0 <= lr < math.inf:
            return None
        now[at] = seen[at]
        is_alone = all(map(operator.is_, now, seen))
        now[at] = lr
        if not is_alone:
            return None
        check = self._optimizer.options["lr"]
        if check is not checks.number:  # checks.number would repeat the test above
            check("lr", lr)
        options = (*before[:k], lr, *before[k + 1 :])
        return Reading(flags, options, plan, now, {**checked, "lr": lr}, mutable, skips, on_device, structure, k, at)

    def _check_changed(self, group: Group, names: Sequence[str]) -> None:
        # plain floats need no conversion before the check
        is_plain = all(type(group[name]) is float and group[name] >= 0 for name in names)
        self._optimizer.check(group if is_plain else for_check(group), names)


def for_check(group: Group) -> Group:
    """A copy to check: values on a device count as 0, so that nothing waits, and so does a tiny negative lr."""
    now = {**group, **{name: 0.0 for name in MAY_BE_ON_DEVICE if is_on_device(group.get(name))}}
    lr = now.get("lr")
    if isinstance(lr, Tensor) and lr.numel() == 1 and lr.device.type == "cpu":
        lr = lr.item()
    # schedulers may miss 0 by a rounding error, as LinearLR(end_factor=0) does; torch accepts the result
    return {**now, "lr": 0.0} if isinstance(lr, float) and -LARGEST_ROUNDING_ERROR <= lr < 0 else now


def _value(name: str, value: Any) -> Any:
    """An option as it is now: a tensor by its value, unless reading it would wait for a device."""
    if isinstance(value, (list, tuple)):
        return tuple(_value("", each) for each in value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type != "meta":
        return value if name in MAY_BE_ON_DEVICE and is_on_device(value) else value.item()
    return value


def _number(name: str, value: Any) -> Any:
    """A hyper-parameter as the rule's scalars get it: a float, a string, or a tensor that stays on its device."""
    if isinstance(value, str) or (name in MAY_BE_ON_DEVICE and is_on_device(value)):
        return value
    return float(value)


def _same(a: Any, b: Any) -> bool:
    if a is b or isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    try:
        return type(a) is type(b) and bool(a == b)
    except (RuntimeError, TypeError, ValueError):  # arrays, for example, compare element by element
        return False


def _is_mutable(value: Any) -> bool:
    return isinstance(value, (Tensor, list, Mapping)) or (isinstance(value, tuple) and any(map(_is_mutable, value)))
