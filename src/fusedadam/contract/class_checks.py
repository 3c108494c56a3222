"""Does a class agree with its rule? What is missing or misnamed is refused when the class is defined, not in a step.

The classes of this package are checked by tests instead, so that importing it stays fast.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fusedadam.contract.declarations import Group, State
from fusedadam.formats import FORMATS
from fusedadam.rules.rule import PARAM_SCALARS, Rule

if TYPE_CHECKING:
    from fusedadam.contract.base import FusedOptimizer

# options that a rule has to use, and the values with which they do nothing
WITHOUT_EFFECT: dict[str, Any] = {"maximize": False, "weight_decay": 0, "max_grad_norm": None}


def check_kinds(cls: type[FusedOptimizer]) -> None:
    """``rule`` is a Rule; ``options`` and ``derived`` map names to functions."""
    if not isinstance(cls.rule, Rule):
        name = getattr(cls.rule, "__name__", "it")
        raise TypeError(
            f"{cls.__name__}.rule is a {type(cls.rule).__name__}; make {name} a rule: write @rule(scalars=...) above it"
        )
    for what, functions in (("options", cls.options), ("derived", cls.derived)):
        for name, function in functions.items():
            if not callable(function):
                raise TypeError(
                    f"{cls.__name__}.{what}[{name!r}] is {function!r}; it must be a function, which is passed and not "
                    "called: checks.betas, not checks.betas(...)"
                )


def check_class(cls: type[FusedOptimizer]) -> None:
    """``states``, ``options``, ``derived`` and ``fixed``, and the signature of ``__init__``."""
    _check_states(cls)
    known = {*cls.options, *cls.derived, *cls.fixed}
    unknown = [name for name in _needed(cls) if name not in known]
    own = [name for name in unknown if name in PARAM_SCALARS]
    if own:
        raise TypeError(
            f"the scalars of {cls.__name__} take {', '.join(own)}, which comes from each parameter; name it in the "
            "signature of the rule, as a Scalar, and calculate with it there"
        )
    if unknown:
        raise TypeError(
            f"the rule of {cls.__name__} needs {', '.join(unknown)}; declare each in options, derived or fixed"
        )
    parameters = list(inspect.signature(cls.__init__).parameters.values())[2:]  # after self and params
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
        return  # they are known when an optimizer is made
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    required = [p.name for p in parameters if p.default is p.empty]
    for what, missing in _missing(cls, defaults):
        if missing not in required:
            raise TypeError(
                f"the rule of {cls.__name__} needs {what}; add it to the arguments of __init__, or to fixed if it is "
                "always the same"
            )


def as_the_rule_says(cls: type[FusedOptimizer]) -> Mapping[str, State]:
    """The declared states, each with what the rule's signature says that it has a value for."""
    if not isinstance(cls.states, Mapping):
        return cls.states  # refused by check_class
    return {
        name: dataclasses.replace(state, by=cls.rule.spaces.get(name, "element")) if isinstance(state, State) else state
        for name, state in cls.states.items()
    }


def check_options(cls: type[FusedOptimizer], options: Group) -> None:
    """What ``__init__`` has passed on: all that the rule needs, as numbers, and no option that does not exist."""
    for name in options:
        if name not in cls.options:
            alike = difflib.get_close_matches(name, cls.options, n=1)
            meant = f"did you mean {alike[0]!r}?" if alike else f"it has {', '.join(cls.options)}"
            raise TypeError(f"{cls.__name__} has no option {name!r}; {meant} (An author declares it in options.)")
    for what, missing in _missing(cls, options):
        raise TypeError(
            f"the rule of {cls.__name__} needs {what}; pass it on: super().__init__(params, {missing}={missing}, ...)"
        )


class Recorded(UserDict[str, Any]):
    """Options that know which of them were asked for; copying asks for all of them."""

    def __init__(self, options: Group) -> None:
        self.asked: set[str] = set()
        self.data = dict(options)

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return self.data[name]

    def __or__(self, other: Any) -> Any:
        return {**self, **other}

    def __ror__(self, other: Any) -> Any:
        return {**other, **self}


def check_effects(cls: type[FusedOptimizer], options: Group) -> None:
    """Refuses an option that every optimizer may have, but that this one's rule does nothing with."""
    given = [
        name for name in WITHOUT_EFFECT if options.get(name, WITHOUT_EFFECT[name]) not in (WITHOUT_EFFECT[name], 0)
    ]
    if not given:
        return
    read = options_read(cls, options)
    for name in given:
        if name not in read:
            raise ValueError(
                f"{name}={options[name]!r} has no effect in {cls.__name__}: its rule does not use it; leave it out, or "
                "add it to the rule"
            )


def options_read(cls: type[FusedOptimizer], options: Group) -> frozenset[str]:
    """The options that the rule's flags and hyper-parameters follow from."""
    read: Any = Recorded(options)
    for name in _needed(cls):
        cls.value(read, name)
    return frozenset(read.asked)


def _check_states(cls: type[FusedOptimizer]) -> None:
    states = [role for role in cls.rule.roles if role not in ("param", "grad")]
    declared = getattr(cls, "states", {})
    if not isinstance(declared, Mapping) or sorted(states) != sorted(declared):
        raise TypeError(
            f"{cls.__name__}.states has {', '.join(map(str, declared)) or 'nothing'}, and its rule has "
            f"{', '.join(states) or 'no states'}; declare each of these, as in states = {{'exp_avg': State()}}"
        )
    suffixes = tuple({array.suffix for fmt in FORMATS.values() for array in fmt.arrays if array.suffix})
    for name, state in declared.items():
        if not isinstance(state, State):
            kind = "the class State" if state is State else f"a {type(state).__name__}"
            raise TypeError(
                f"{cls.__name__}.states[{name!r}] is {kind}; write State(), with parentheses and what differs from its "
                "defaults"
            )
        if name == "step" or name.endswith(suffixes):
            raise TypeError(
                f"{cls.__name__}.states has {name!r}, a name that state dicts use; choose another, without "
                f"{', '.join(sorted(suffixes))} at its end"
            )
        if state.dtype_option not in (*cls.options, "state_dtype"):
            raise TypeError(
                f"{cls.__name__}.states[{name!r}] has dtype_option={state.dtype_option!r}, which is not in options"
            )
        by = cls.rule.spaces[name]
        if by != "element" and state.initial == "param":
            raise TypeError(
                f"{cls.__name__}.states[{name!r}] begins as a copy of the parameter, and has one value for each {by}; "
                "use another initial value, or annotate it as Value in the rule"
            )
        others = {"maximum_of": state.maximum_of, "subtracted_from": state.subtracted_from}
        for what, other in others.items():
            if other is not None and other not in (*states, "grad"):
                raise TypeError(f"{cls.__name__}.states[{name!r}] has {what}={other!r}, which is no state of its rule")
        if state.decay is not None and state.decay not in {*cls.options, *cls.derived, *cls.fixed}:
            raise TypeError(
                f"{cls.__name__}.states[{name!r}] has decay={state.decay!r}, which is neither in options nor in derived"
            )


def _missing(cls: type[FusedOptimizer], options: Group) -> Iterator[tuple[str, str]]:
    """What the rule needs that these options do not give, in words, and the option that is missing."""
    for name in _needed(cls):
        try:
            value = cls.value(options, name)
        except KeyError as error:
            missing = str(error.args[0])
            yield (name if missing == name else f"{name}, which follows from {missing}"), missing
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
