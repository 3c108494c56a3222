"""Checks, when a rule is defined, that its scalars have the same bits on the host and on a device.

On the host, scalars are computed with Python's numbers. If only the device knows the step (GradScaler, capturable, a
learning rate on the device), a kernel computes them, which has a list of operations and no Python: ``if step == 1`` and
``math.sqrt`` would need a number that the host does not know. So the function is called with ``Traced`` values, which
allow only what gives the same bits on both sides, and refuse everything else with a message that says what to write
instead. They also record what they were made from, for ``scalar_program.py``.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import numpy as np

ARGUMENT = "argument"
ARITHMETIC, COMPARISONS, JOINS = ("add", "sub", "mul"), ("lt", "le", "gt", "ge", "eq", "ne"), ("and", "or")
MAY_BE_ON_DEVICE = ("lr", "weight_decay")  # options that are not read on the host if they are tensors on a device


class NotOnBothSides(TypeError):
    """Scalars that would differ between host and device. The message begins with the code that is refused."""


class Traced:
    """A scalar whose value is not known yet: the result of ``op`` on ``operands``, numbers or other traced scalars.

    ``on_device``: the host may not know it. ``is_count``: it is the step itself. The op of an argument is ARGUMENT, its
    operand the argument's name.
    """

    __array_ufunc__ = None  # numpy's functions need numbers

    def __init__(self, op: str, operands: Sequence[Any], on_device: bool, is_count: bool = False) -> None:
        self.op, self.operands = op, tuple(operands)
        self.on_device, self.is_count, self.is_condition = on_device, is_count, op in (*COMPARISONS, *JOINS)

    @classmethod
    def argument(cls, name: str) -> Traced:
        is_count = name == "step"
        return cls(ARGUMENT, (name,), is_count or name in MAY_BE_ON_DEVICE, is_count)

    @classmethod
    def of(cls, op: str, values: Sequence[Any]) -> Traced:
        """The result of an op, of arithmetic or of a comparison of these values."""
        if op not in ("where", *JOINS):
            _check_are_numbers(values)
        return cls(op, values, any(isinstance(value, Traced) and value.on_device for value in values))

    @classmethod
    def chosen(cls, condition: Any, a: Any, b: Any) -> Any:
        """where(condition, a, b), which is a condition if both sides are."""
        if isinstance(condition, (bool, np.bool_)):
            return a if condition else b
        if not getattr(condition, "is_condition", False):
            raise NotOnBothSides(
                "the first argument of where(condition, a, b) is a number; compare it, as in where(x > 0, a, b)"
            )
        result = cls.of("where", [condition, a, b])
        result.is_condition = all(isinstance(side, Traced) and side.is_condition for side in (a, b))
        if not result.is_condition:
            _check_are_numbers([a, b])
        return result

    def __neg__(self) -> Traced:
        return self.of("neg", [self])

    def __pos__(self) -> Traced:
        return self.of("pos", [self])

    def __truediv__(self, other: Any) -> Traced:
        return self.of("divide", [self, other])

    def __rtruediv__(self, other: Any) -> Traced:
        return self.of("divide", [other, self])

    def __pow__(self, exponent: Any) -> Traced:
        if not (isinstance(exponent, Traced) and exponent.is_count) or self.on_device:
            _refuse("`**` other than `beta ** step`", "write x * x, or power(x, y)")
        return self.of("pow", [self, exponent])

    def __rpow__(self, base: Any) -> Traced:
        if not self.is_count:
            _refuse("`**` other than `beta ** step`", "write x * x, or power(x, y)")
        if isinstance(base, np.generic):  # numpy's numbers, even float64, have powers of their own
            _refuse_constant(base)
        return self.of("pow", [base, self])

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

    def __invert__(self) -> NoReturn:
        raise NotOnBothSides("nothing negates a condition; exchange the sides of where(condition, a, b)")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # asked by Python and numpy
            raise AttributeError(name)
        raise NotOnBothSides(f"a sum, or `.{name}`, of a scalar: it is one number, and the rule is what sums elements")

    def _unknown(self, *_: Any) -> NoReturn:
        _refuse("`%`, `//`, divmod() or abs() on a scalar", "write it with + - * / and the functions of fusedadam.ops")

    def _parts(self, *_: Any) -> NoReturn:
        _refuse("an index on a scalar", "take each number as an argument: beta1, beta2 and beta3 follow from betas")

    __getitem__ = __iter__ = _parts

    __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __divmod__ = __rdivmod__ = __abs__ = _unknown


def _record(op: str) -> None:
    """Lets traced scalars do arithmetic, a comparison, or join two comparisons."""

    def operate(self: Traced, other: Any) -> Traced:
        if op in JOINS and not (self.is_condition and isinstance(other, Traced) and other.is_condition):
            _refuse("`&` and `|` on anything but two comparisons", "write where(condition, a, b)")
        return Traced.of(op, [self, other])

    def reflected(self: Traced, other: Any) -> Traced:
        return Traced.of(op, [other, self])

    setattr(Traced, f"__{op}__", operate)
    if op in ARITHMETIC:
        setattr(Traced, f"__r{op}__", reflected)


for _op in (*ARITHMETIC, *COMPARISONS, *JOINS):
    _record(_op)


def made_from(values: Iterable[Any], whole: Sequence[str] = ()) -> list[Traced]:
    """The traced scalars among these values and all that they were computed from, operands first. What the results of
    an op in ``whole`` were computed from is left out."""
    found: dict[int, Traced] = {}
    left = [(value, False) for value in values][::-1]
    while left:  # a loop: an exp or a log is a chain of a hundred operations
        value, has_operands = left.pop()
        if not isinstance(value, Traced) or id(value) in found:
            continue
        if has_operands or value.op in whole:
            found[id(value)] = value
        else:
            left += [(value, True), *((operand, False) for operand in reversed(value.operands))]
    return list(found.values())


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
        _check_are_numbers([result[name] for name in wanted])


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
        _refuse_strings()
    given = {name: (parameters[name].default,) for name in names if isinstance(parameters[name].default, str)}
    return given | {
        name: get_args(hints[name]) for name in names if get_origin(hints.get(name)) is Literal and name not in given
    }


def _check_are_numbers(values: Sequence[Any]) -> None:
    for value in values:
        if isinstance(value, Traced):
            if value.is_condition:
                raise NotOnBothSides("a comparison is a condition, not a number; write where(condition, 1.0, 0.0)")
        elif isinstance(value, str):
            _refuse_strings()
        elif not isinstance(value, (int, float, np.integer)):
            _refuse_constant(value)


def _refuse(what: str, instead: str) -> NoReturn:
    raise NotOnBothSides(f"{what} is not the same on a device, or needs to wait for it; {instead}")


def _refuse_strings() -> NoReturn:
    raise NotOnBothSides("an argument is a str, of which not every value can be tried; use Literal['a', 'b'] instead")


def _refuse_constant(value: Any) -> NoReturn:
    raise NotOnBothSides(
        f"a constant is a {type(value).__name__}, which is not rounded as on a device; write float(...) around it"
    )
