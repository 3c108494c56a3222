"""Step numbers as scalars see them: ``beta ** step`` has the same bits on the host and on every device.

The power functions of C libraries and GPUs differ in the last bit; so would results, where a training goes on with
another machine, or where the counts move to the device (GradScaler, capturable). A power is therefore a product of four
factors, one for each digit of the step number, from a small table of that beta's powers. The factors are made of
integers and rounded once, and multiplication is IEEE's everywhere. A new beta, as schedulers that cycle the momentum
bring in every step, costs a few hundred products of integers at most.
"""

from __future__ import annotations

import functools
import math
import operator
from array import array
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fusedadam.rules.ops import divide
from fusedadam.rules.tracing import OnDevice
from fusedadam.tensors.transfer import keep_for_graph, sent

# Where each digit begins in a step number, and how many values it has. The first two are looked up together, and so are
# the last two.
SHIFTS, SIZES = (0, 6, 12, 18), (64, 64, 64, 128)
LAST = (1 << 25) - 1  # later steps get this one's power; float32 counts to 2**24
PRECISION = 128  # bits behind the point
ONE = 1 << PRECISION
RECENT = 64  # betas whose tables the host keeps


class Powers:
    """The powers of one number: ``factor(digit, d)`` is ``base ** (d << SHIFTS[digit])``, made when it is asked for."""

    def __init__(self, base: float) -> None:
        numerator, denominator = base.as_integer_ratio()
        self._steps = [numerator * ONE // denominator]  # of each digit, what one more of it multiplies by
        self._lines = [(array("d", [1.0]), ONE)] * len(SIZES)  # of each digit: what is known, and the last one exactly

    def factor(self, digit: int, d: int) -> float:
        known, exact = self._lines[digit]
        if len(known) <= d:
            step, more = self._step(digit), array("d")
            for _ in range(len(known), d + 1):
                exact = exact * step >> PRECISION
                more.append(math.ldexp(exact, -PRECISION))
            known = known + more
            self._lines[digit] = known, exact  # in one piece: other threads, and Ctrl-C, may come at any time
        return known[d]

    def power(self, number: int) -> float:
        a, b, c, d = (
            self.factor(k, number >> shift & size - 1)
            for k, (shift, size) in enumerate(zip(SHIFTS, SIZES, strict=True))
        )
        return (a * b) * (c * d)

    def table(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """All factors, digit by digit."""
        return np.array([self.factor(digit, d) for digit, size in enumerate(SIZES) for d in range(size)])

    def _step(self, digit: int) -> int:
        steps = self._steps
        while len(steps) <= digit:
            step = steps[-1]
            for _ in range(SHIFTS[1]):
                step = step * step >> PRECISION
            steps = [*steps, step]
        self._steps = steps  # in one piece, as above
        return steps[digit]


recent_powers = functools.lru_cache(maxsize=RECENT)(Powers)


class Count(float):
    """A step number on the host."""

    def __rpow__(self, base: float, _: None = None) -> float:
        return recent_powers(float(base)).power(min(int(self), LAST))


Pair: TypeAlias = tuple[Tensor, Tensor]  # products of the factors of the first two digits, and of the last two


class PowerTables:
    """The tables of one device, for one stream or graph: of the betas that the last step used, and no others."""

    def __init__(self) -> None:
        self._kept: dict[float, Pair] = {}
        self._used: dict[float, Pair] = {}

    def of(self, base: float, device: torch.device) -> Pair:
        if base not in self._used:
            known = self._kept.get(base)
            self._used[base] = _pair(sent(recent_powers(base).table(), device)) if known is None else known
        return self._used[base]

    def end_step(self) -> None:
        self._kept, self._used = self._used, {}

    def __len__(self) -> int:
        return len(self._kept.keys() | self._used.keys())


def _pair(table: Tensor) -> Pair:
    a, b, c, d = table.split(list(SIZES))
    return keep_for_graph((b[:, None] * a).view(-1)), keep_for_graph((d[:, None] * c).view(-1))


class DeviceCount(OnDevice):
    """Step numbers on a device, one for each parameter: float64, and known only there."""

    def __init__(self, numbers: Tensor, tables: PowerTables) -> None:
        self.numbers, self._tables = numbers, tables

    def __rpow__(self, base: float) -> Tensor:
        (small, large), (low, high) = self._tables.of(float(base), self.numbers.device), self._parts
        return small.take(low) * large.take(high)

    @functools.cached_property
    def _parts(self) -> tuple[Tensor, Tensor]:
        whole = self.numbers.clamp(max=LAST).to(torch.int64)
        return whole & (1 << SHIFTS[2]) - 1, whole >> SHIFTS[2]

    def __truediv__(self, other: Any) -> Any:
        return divide(self.numbers, other)

    def __rtruediv__(self, other: Any) -> Any:
        return divide(other, self.numbers)

    def __neg__(self) -> Any:
        return -self.numbers

    __hash__ = None  # type: ignore[assignment]  # == is by element


def _forward(name: str) -> None:
    """Whatever else a rule's scalars may do with a number, the tensor does."""
    function = getattr(operator, name)
    setattr(DeviceCount, f"__{name}__", lambda self, other: function(self.numbers, other))
    if name in ("add", "sub", "mul"):
        setattr(DeviceCount, f"__r{name}__", lambda self, other: function(other, self.numbers))


for _name in ("add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne"):
    _forward(_name)
