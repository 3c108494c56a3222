"""Does a class agree with its rule? What is missing or misnamed is refused when the class is defined, not in a step.

The classes of this package are checked by tests instead, so that importing it stays fast.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fusedadam.optimizers.declarations import Group

if TYPE_CHECKING:
    from fusedadam.optimizers.base import FusedOptimizer


def check_class(cls: type[FusedOptimizer]) -> None:
    """``states``, ``options``, ``derived`` and ``fixed``, and the signature of ``__init__``."""
    _check_states(cls)
    known = {*cls.options, *cls.derived, *cls.fixed}
    unknown = [name for name in _needed(cls) if name not in known]
    if unknown:
        raise TypeError(
            f"the rule of {cls.__name__} needs {', '.join(unknown)}; declare each in options, derived or fixed"
        )
    parameters = list(inspect.signature(cls.__init__).parameters.values())[2:]  # after self and params
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
        return  # they are known when an optimizer is made
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    required = [p.name for p in parameters if p.default is p.empty]
    for name, missing in _missing(cls, defaults):
        if missing not in required:
            what = name if missing == name else f"{name}, which follows from {missing}"
            raise TypeError(
                f"the rule of {cls.__name__} needs {what}; add it to the arguments of __init__, or to fixed if it is "
                "always the same"
            )


def check_options(cls: type[FusedOptimizer], options: Group) -> None:
    """What ``__init__`` has passed on: all that the rule needs, as numbers, and no option that does not exist."""
    for name in options:
        if name not in cls.options:
            raise TypeError(
                f"{cls.__name__} has no option {name!r}; it has {', '.join(cls.options)}. A new one needs a check: "
                f"options = OPTIONS | {{{name!r}: checks.number}}"
            )
    for name, missing in _missing(cls, options):
        what = name if missing == name else f"{name}, which follows from {missing}"
        raise TypeError(
            f"the rule of {cls.__name__} needs {what}; pass it on: super().__init__(params, {missing}={missing}, ...)"
        )


def _check_states(cls: type[FusedOptimizer]) -> None:
    states = [role for role in cls.rule.roles if role not in ("param", "grad")]
    declared = getattr(cls, "states", {})
    if sorted(states) != sorted(declared):
        raise TypeError(f"{cls.__name__}.states must declare the states of its rule ({', '.join(states)}), no other")
    for name, state in declared.items():
        others = {"maximum_of": state.maximum_of, "subtracted_from": state.subtracted_from}
        for what, other in others.items():
            if other is not None and other not in states:
                raise TypeError(f"{cls.__name__}.states[{name!r}] has {what}={other!r}, which is no state of its rule")
        if state.decay is not None and state.decay not in {*cls.options, *cls.derived, *cls.fixed}:
            raise TypeError(
                f"{cls.__name__}.states[{name!r}] has decay={state.decay!r}, which is neither in options nor in derived"
            )


def _missing(cls: type[FusedOptimizer], options: Group) -> Iterator[tuple[str, str]]:
    """What the rule needs that these options do not give, and the option that is missing or too short."""
    for name in _needed(cls):
        try:
            value = cls.value(options, name)
        except KeyError as error:
            yield name, str(error.args[0])
        except IndexError:
            raise TypeError(
                f"the rule of {cls.__name__} needs {name}, and betas={options['betas']!r} has no such value; give it "
                "one more, and check it with functools.partial(checks.betas, count=...)"
            ) from None
        else:
            _check_is_number(cls, name, value)


def _check_is_number(cls: type[FusedOptimizer], name: str, value: Any) -> None:
    if isinstance(value, str) and name not in cls.rule.choices:
        raise TypeError(
            f"{name}={value!r} is a string, and the scalars of {cls.__name__}'s rule calculate with numbers; if it "
            f"chooses between formulas, annotate it there with its values: {name}: Literal[{value!r}, ...]"
        )


def _needed(cls: type[FusedOptimizer]) -> tuple[str, ...]:
    return (*cls._flags, *cls.rule.hyper_parameters)
