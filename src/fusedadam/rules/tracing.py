"""Checks, when a rule is defined, that its scalars have the same bits on the host and on a device.

On the host, scalars are computed with Python's numbers. If only the device knows the step (GradScaler, capturable, a
learning rate on the device), the same function is given tensors. Tensors do most of what numbers do, but not all:
``if step == 1`` would wait for the device or fail there, ``math.sqrt`` needs a number, and ``x / 3`` is rounded
differently. So the function is called once with ``Traced`` values, which allow only what gives the same bits on both
sides, and refuse everything else with a message that says what to write instead. They also record what they were made
from, for ``scalar_program.py``.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

ARGUMENT = "argument"
ARITHMETIC, COMPARISONS, JOINS = ("add", "sub", "mul"), ("lt", "le", "gt", "ge", "eq", "ne"), ("and", "or")
MAY_BE_ON_DEVICE = ("lr", "weight_decay")  # options that are not read on the host if they are tensors on a device


class OnDevice:
    """An argument of ops that stands for the tensor ``numbers``."""

    numbers: Any


class NotOnBothSides(TypeError):
    """Scalars that would differ between host and device. The message begins with the code that is refused."""


class Traced:
    """A scalar whose value is not known yet: the result of ``op`` on ``operands``, numbers or other traced scalars.

    ``by_step``: it is computed from the step, and is a tensor if the step is one. ``is_count``: it is the step itself.
    ``may_be_tensor``: it may be a tensor even if the step is not. The op of an argument is ARGUMENT, its operand the
    argument's name.
    """

    __array_ufunc__ = None  # numpy's functions do not take tensors on a device

    def __init__(
        self, op: str, operands: Sequence[Any], by_step: bool = False, *, is_count: bool = False,
        may_be_tensor: bool = True,
    ) -> None:  # fmt: skip
        self.op, self.operands = op, tuple(operands)
        self.by_step, self.is_count, self.may_be_tensor = by_step or is_count, is_count, may_be_tensor
        self.is_condition = False

    @classmethod
    def argument(cls, name: str) -> Traced:
        is_count = name == "step"
        return cls(ARGUMENT, (name,), is_count=is_count, may_be_tensor=is_count or name in MAY_BE_ON_DEVICE)

    @classmethod
    def of(cls, op: str, values: Sequence[Any]) -> Traced:
        """The result of an op or of arithmetic on these values."""
        traced = [value for value in values if isinstance(value, Traced)]
        by_step, may_be_tensor = any(v.by_step for v in traced), any(v.may_be_tensor for v in traced)
        return cls(op, values, by_step, may_be_tensor=may_be_tensor)

    @classmethod
    def chosen(cls, condition: Any, a: Any, b: Any) -> Traced:
        """where(condition, a, b): a tensor if the condition is one, or if both sides are."""
        if isinstance(condition, Traced) and not condition.is_condition:
            raise NotOnBothSides(
                "the first argument of where(condition, a, b) is a number; compare it, as in where(x > 0, a, b)"
            )
        result = cls.of("where", [condition, a, b])
        result.is_condition = all(isinstance(side, Traced) and side.is_condition for side in (a, b))
        sides = all(isinstance(side, Traced) and side.by_step for side in (a, b))
        result.by_step = sides or (isinstance(condition, Traced) and condition.by_step)
        return result

    def _with(self, op: str, *operands: Any) -> Traced:
        for value in operands:
            if isinstance(value, Traced) and value.is_condition:
                _refuse("arithmetic on a comparison", "write where(condition, a, b)")
        return Traced.of(op, operands)

    def __neg__(self) -> Traced:
        return self._with("neg", self)

    def __pos__(self) -> Traced:
        return self._with("pos", self)

    def __truediv__(self, other: Any) -> Traced:
        both = isinstance(other, Traced) and self.by_step and other.by_step
        if not (both or _is_power_of_two(other) or self.is_count):
            _refuse("`/` (unless both sides follow from the step)", "write divide(a, b), which rounds alike everywhere")
        return self._with("divide", self, other)

    def __rtruediv__(self, other: Any) -> Traced:
        if not (_is_power_of_two(other) or self.is_count):
            _refuse("`/` (unless both sides follow from the step)", "write divide(a, b), which rounds alike everywhere")
        return self._with("divide", other, self)

    def __pow__(self, exponent: Any) -> Traced:
        if not (isinstance(exponent, Traced) and exponent.is_count and not (self.may_be_tensor or self.by_step)):
            _refuse("`**` other than `beta ** step`", "write x * x, or power(x, y)")
        return self._with("pow", self, exponent)

    def __rpow__(self, base: Any) -> Traced:
        if not self.is_count:
            _refuse("`**` other than `beta ** step`", "write x * x, or power(x, y)")
        return self._with("pow", base, self)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> NoReturn:
        _refuse(
            "`if`, `and`, `or`, `not`, min() or max() on a scalar",
            "write where(condition, a, b), `&`, `|`, minimum or maximum of fusedadam.ops",
        )

    def _as_number(self, *_: Any) -> NoReturn:
        _refuse(
            "float(), int(), round() or a function of math on a scalar",
            "use fusedadam.ops, such as sqrt",
        )

    __float__ = __int__ = __index__ = __round__ = __trunc__ = __floor__ = __ceil__ = __complex__ = _as_number

    def _unknown(self, *_: Any) -> NoReturn:
        _refuse("`%`, `//`, divmod() or abs() on a scalar", "write it with + - * / and the functions of fusedadam.ops")

    def _parts(self, *_: Any) -> NoReturn:
        _refuse("an index on a scalar", "take each number as an argument: beta1, beta2 and beta3 follow from betas")

    __getitem__ = __iter__ = _parts

    __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __divmod__ = __rdivmod__ = __abs__ = _unknown


def _record(op: str) -> None:
    """Lets traced scalars do arithmetic, a comparison, or join two comparisons."""

    def arithmetic(self: Traced, other: Any) -> Traced:
        return self._with(op, self, other)

    def reflected(self: Traced, other: Any) -> Traced:
        return self._with(op, other, self)

    def compare(self: Traced, other: Any) -> Traced:
        result = self._with(op, self, other)
        result.is_condition = True
        return result

    def join(self: Traced, other: Any) -> Traced:
        if not (self.is_condition and isinstance(other, Traced) and other.is_condition):
            _refuse("`&` and `|` on anything but two comparisons", "write where(condition, a, b)")
        result = Traced.of(op, [self, other])
        result.is_condition = True
        return result

    if op in ARITHMETIC:
        setattr(Traced, f"__r{op}__", reflected)
    setattr(Traced, f"__{op}__", arithmetic if op in ARITHMETIC else join if op in JOINS else compare)


for _op in (*ARITHMETIC, *COMPARISONS, *JOINS):
    _record(_op)


def check(scalars: Callable[..., Mapping[str, Any]], wanted: Sequence[str]) -> None:
    """Raises NotOnBothSides unless the function computes ``wanted`` alike on the host and on a device."""
    for arguments in _arguments(scalars):
        try:
            result = scalars(**arguments)
        except NotOnBothSides:
            raise
        except Exception as error:
            raise NotOnBothSides(
                f"it raises {type(error).__name__} ({error}) for scalars that are not known yet, as on a device; use "
                "+ - * / and fusedadam.ops"
            ) from error
        if not isinstance(result, Mapping):
            kinds: dict[type, str] = {type(None): "nothing", Traced: "one number"}
            kind = kinds.get(type(result), f"a {type(result).__name__}")
            raise NotOnBothSides(
                f"it returns {kind}; it must return a dict of the rule's scalars by name, such as return {{'lr': lr}}"
            )
        missing = [name for name in wanted if name not in result]
        if missing:
            raise NotOnBothSides(f"it does not return {', '.join(missing)}, which the rule asks for; add it")


def line_in(scalars: Callable[..., Any], error: BaseException | None) -> str:
    """Where scalars have raised an error: ``line 12``, or ``as a whole`` if they have not raised it themselves."""
    code, found = getattr(inspect.unwrap(scalars), "__code__", None), "as a whole"
    while error is not None:
        frames = error.__traceback__
        while frames is not None:
            if frames.tb_frame.f_code is code:
                found = f"line {frames.tb_lineno}"
            frames = frames.tb_next
        error = error.__cause__
    return found


def _arguments(scalars: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """The arguments of each call: options of type ``Literal[...]`` take each of their values, others are traced."""
    tried = choices(scalars)
    for chosen in itertools.product(*tried.values()):
        yield {name: Traced.argument(name) for name in _names(scalars)} | dict(zip(tried, chosen, strict=True))


def _names(scalars: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(scalars).parameters
    return [name for name, given in parameters.items() if given.kind not in (given.VAR_POSITIONAL, given.VAR_KEYWORD)]


def choices(scalars: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """The arguments that are strings, and the values of each."""
    parameters, names = inspect.signature(scalars).parameters, _names(scalars)
    try:
        hints = get_type_hints(scalars)
    except (NameError, TypeError):  # names that only a local scope knows; a functools.partial
        hints = {name: parameters[name].annotation for name in names}
    if any(hints.get(name) in (str, "str") for name in names):
        raise NotOnBothSides(
            "an argument is a str, of which not every value can be tried; use Literal['a', 'b'] instead"
        )
    given = {name: (parameters[name].default,) for name in names if isinstance(parameters[name].default, str)}
    return given | {
        name: get_args(hints[name]) for name in names if get_origin(hints.get(name)) is Literal and name not in given
    }


def _is_power_of_two(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(math.frexp(value)[0]) == 0.5


def _refuse(what: str, instead: str) -> NoReturn:
    raise NotOnBothSides(f"{what} is not the same on a device, or needs to wait for it; {instead}")
