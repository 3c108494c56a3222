"""Numbers that know how far a computation in float32 may be from them (running error analysis).

A rule is called as plain Python with these numbers in place of tensors. Each result carries its exact value, in
float64, and a bound on the error of the same operations with every result rounded to the dtype that kernels compute in.
So a step of any rule can be judged, without knowing the rule: where its terms cancel, the bound grows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusedadam.rules import ops
from fusedadam.rules.newton_schulz import DEFAULT, NewtonSchulz
from fusedadam.rules.orthogonal import orthogonalize
from fusedadam.rules.sums import COLUMN_SEGMENT, LANES, SEGMENT
from fusedadam.tensors.matrices import matrices_of

F64 = torch.float64
EXPONENT = 0x7FF0000000000000  # of a float64
# Additions on the way of a term into its sum: along a lane, and in pairs of lanes. Everything above is in float64.
ADDITIONS = SEGMENT["element"] // LANES + LANES.bit_length()
OF_LARGEST = {torch.float32: 2.0**-2, F64: 2.0**-30}  # errors of products of matrices in bfloat16, or in float64
MOST_AMPLIFIED = 2.0**10  # of singular values near 0, in five iterations: 3.4445 ** 5 is 485
Operand: TypeAlias = "Bounded | float"


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbouring numbers of ``dtype`` near ``values``."""
    info = torch.finfo(dtype)
    size = values.double().abs().clamp_min(info.tiny)
    return (size.view(torch.int64) & EXPONENT).view(F64) * info.eps


@dataclass
class Run:
    """One evaluation of a rule: the dtype that it rounds to, and its results in the order in which they are made.

    ``replaced``: results by their place in this order that are replaced by an exact value, since kernels store and
    reload them there. What they would have been is in ``computed``.
    """

    dtype: torch.dtype
    replaced: Mapping[int, Tensor] = field(default_factory=dict)
    computed: dict[int, Bounded] = field(default_factory=dict)
    count: int = 0

    def exact(self, value: Any) -> Bounded:
        """A value that needs no rounding, or a number of the rule or its scalars, which is rounded once."""
        tensor = torch.as_tensor(value, dtype=F64)
        error = (tensor.to(self.dtype).double() - tensor).abs()
        return Bounded(self, tensor, error.nan_to_num(nan=0.0))  # an infinite limit is exact

    def of(self, value: Operand) -> Bounded:
        return value if isinstance(value, Bounded) else self.exact(value)

    def rounded(self, value: Tensor, error: Tensor, roundings: float = 1.0) -> Bounded:
        error = error.nan_to_num(nan=torch.inf)
        is_zero = (value == 0) & (error == 0)
        half = 0.5 * roundings * ulp((value.abs() + error).nan_to_num(nan=0.0, posinf=0.0), self.dtype)
        return self._made(value, torch.where(is_zero, error, error + half))

    def unrounded(self, value: Tensor, error: Tensor) -> Bounded:
        return self._made(value, error.nan_to_num(nan=torch.inf))

    def _made(self, value: Tensor, error: Tensor) -> Bounded:
        made, place = Bounded(self, value, error, self.count), self.count
        self.count += 1
        if place not in self.replaced:
            return made
        self.computed[place] = made
        return Bounded(self, self.replaced[place].to(F64), torch.zeros_like(value), place)


def _comparison(how: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Bounded, Operand], Condition]:
    def compare(self: Bounded, other: Operand) -> Condition:
        a, b = self, self.run.of(other)
        error = a.error + b.error
        uncertain = (error > 0) & ((a.value - b.value).abs() <= error)
        return Condition(self.run, how(a.value, b.value), uncertain)

    return compare


class Bounded:
    """``value``, and a bound on the ``error`` of what a kernel has for it; ``place``: that of a result in its run."""

    def __init__(self, run: Run, value: Tensor, error: Tensor, place: int | None = None) -> None:
        self.run, self.value, self.error, self.place = run, value, error, place

    def __add__(self, other: Operand) -> Bounded:
        a, b = self._both(other)
        return self.run.rounded(a.value + b.value, a.error + b.error)

    def __sub__(self, other: Operand) -> Bounded:
        a, b = self._both(other)
        return self.run.rounded(a.value - b.value, a.error + b.error)

    def __rsub__(self, other: Operand) -> Bounded:
        return self._both(other)[1] - self

    def __mul__(self, other: Operand) -> Bounded:
        a, b = self._both(other)
        error = a.value.abs() * b.error + b.value.abs() * a.error + a.error * b.error
        return self.run.rounded(a.value * b.value, error)

    def __truediv__(self, other: Operand) -> Bounded:
        a, b = self._both(other)
        value, least = a.value / b.value, (b.value.abs() - b.error).clamp_min(0.0)
        error = (a.error + value.abs() * b.error) / least
        return self.run.rounded(value, torch.where((a.error == 0) & (b.error == 0), torch.zeros_like(error), error))

    def __rtruediv__(self, other: Operand) -> Bounded:
        return self._both(other)[1] / self

    def __neg__(self) -> Bounded:
        return self.run.unrounded(-self.value, self.error)

    __radd__, __rmul__ = __add__, __mul__

    def _both(self, other: Operand) -> tuple[Bounded, Bounded]:
        return self, self.run.of(other)

    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)
    __eq__, __ne__ = _comparison(operator.eq), _comparison(operator.ne)  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Condition:
    """A comparison, and whether rounding may turn it around."""

    run: Run
    value: Tensor
    uncertain: Tensor

    def __and__(self, other: Condition) -> Condition:
        decided = (~self.value & ~self.uncertain) | (~other.value & ~other.uncertain)
        return Condition(self.run, self.value & other.value, (self.uncertain | other.uncertain) & ~decided)

    def __invert__(self) -> Condition:
        return Condition(self.run, ~self.value, self.uncertain)

    def __or__(self, other: Condition) -> Condition:
        return ~(~self & ~other)


def sqrt(x: Bounded) -> Bounded:
    value, least = x.value.sqrt(), x.error.sqrt()
    error = torch.where(x.value > 0, torch.minimum(x.error / value, least), least)
    return x.run.rounded(value, error)


def absolute(x: Bounded) -> Bounded:
    return x.run.unrounded(x.value.abs(), x.error)


def _selected(choose: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Operand, Operand], Bounded]:
    def select(a: Operand, b: Operand) -> Bounded:
        x, y = _both(a, b)
        return x.run.unrounded(choose(x.value, y.value), torch.maximum(x.error, y.error))

    return select


def where(condition: Condition, a: Operand, b: Operand) -> Bounded:
    x, y = condition.run.of(a), condition.run.of(b)
    error = torch.where(condition.value, x.error, y.error)
    either = (x.value - y.value).abs() + torch.maximum(x.error, y.error)
    value = torch.where(condition.value, x.value, y.value)
    return condition.run.unrounded(value, torch.where(condition.uncertain, either, error))


def power(x: Operand, y: Operand) -> Bounded:
    """In float64, then rounded, which may be the wrong way between two neighbours. Monotonic in both arguments."""
    a, b = _both(x, y)
    value = a.value.pow(b.value)
    corners = [
        (a.value + s * a.error).clamp_min(0.0).pow(b.value + t * b.error) - value for s in (-1, 1) for t in (-1, 1)
    ]
    error = torch.stack(torch.broadcast_tensors(*corners)).abs().amax(0)
    return a.run.rounded(value, error, roundings=2.0)


def _summed(add: Callable[[Tensor], Tensor], additions: int = ADDITIONS) -> Callable[[Bounded], Bounded]:
    def summed(x: Bounded) -> Bounded:
        # each addition rounds a sum of some of the terms, which is at most that of their sizes
        each = additions * torch.finfo(x.run.dtype).eps * add(x.value.abs() + x.error)
        return x.run.unrounded(add(x.value), add(x.error) + each)

    return summed


tensor_sum = _summed(ops.tensor_sum)


def largest(x: Bounded) -> Bounded:
    return x.run.unrounded(ops.largest(x.value), ops.largest(x.error))


def orthogonalized(x: Bounded, method: NewtonSchulz = DEFAULT) -> Bounded:
    """Rounding errors of products are not followed, as iterations lose small singular values in 16 bits: errors of some
    share of the largest element are accepted, and a wrong sign, scale or matrix is found."""
    if x.value.numel() == 0:
        return x
    shape = matrices_of(x.value.shape)
    value = x.value.reshape(shape).clone()
    orthogonalize(value, method)
    each = (value, x.value.reshape(shape), x.error.reshape(shape))
    largest, operand, error = (t.abs().amax((1, 2), keepdim=True) for t in each)
    share = OF_LARGEST[x.run.dtype] + MOST_AMPLIFIED * (error / operand).nan_to_num(nan=0.0)
    return x.run.unrounded(value.view(x.value.shape), (largest * share).expand(shape).reshape(x.value.shape))


def _both(a: Operand, b: Operand) -> tuple[Bounded, Bounded]:
    run = a.run if isinstance(a, Bounded) else b.run  # type: ignore[union-attr]
    return run.of(a), run.of(b)


# what a rule calls -> what is called with bounded numbers; judge.py adds sums over several parameters
MEANING: dict[Callable[..., Any], Callable[..., Any]] = {
    ops.sqrt: sqrt, ops.abs: absolute, ops.where: where, ops.power: power,
    ops.maximum: _selected(torch.maximum), ops.minimum: _selected(torch.minimum),
    ops.row_sum: _summed(ops.row_sum), ops.tensor_sum: tensor_sum, ops.sum_last: _summed(ops.sum_last),
    ops.sum_second_last: _summed(ops.sum_second_last, COLUMN_SEGMENT),  # one after the other
    ops.orthogonalized: orthogonalized,
}  # fmt: skip
