"""Step numbers as scalars see them: ``beta ** step`` has the same bits on the host and on every device.

The power functions of C libraries and GPUs differ in the last bit; so would results, where a training goes on with
another machine, or where the counts move to the device (GradScaler, capturable). A power is therefore a product: one
factor for each digit of the step number in base 128, from a small table of that beta's powers. The factors are made of
integers and rounded once, and multiplication is IEEE's everywhere. A new beta, as schedulers that cycle the momentum
bring in every step, costs a few hundred products of integers at most, and 4 KB on a device.
"""

from __future__ import annotations

import functools
import math
import operator
from array import array
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedadam.tracing import OnDevice
from fusedadam.transfer import sent
from fusedadam.words import divide

BITS, DIGITS = 7, 4  # farther than float32 counts
BASE = 1 << BITS
LAST = BASE**DIGITS - 1  # later steps get this one's power
PRECISION = 128  # bits behind the point
ONE = 1 << PRECISION
RECENT = 64  # betas whose tables the host keeps


class Powers:
    """The powers of one number: ``factor(digit, d)`` is ``base ** (d * 128**digit)``, made when it is asked for."""

    def __init__(self, base: float) -> None:
        numerator, denominator = base.as_integer_ratio()
        self._factors = [numerator * ONE // denominator]  # of each digit, as integers
        self._lines = [(array("d", [1.0]), ONE)] * DIGITS  # of each digit: all that are known, and the last one exactly

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
        power, digit = 1.0, 0
        while number:
            power *= self.factor(digit, number & BASE - 1)
            number, digit = number >> BITS, digit + 1
        return power

    def table(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array([[self.factor(digit, d) for d in range(BASE)] for digit in range(DIGITS)])

    def _step(self, digit: int) -> int:
        """What one more of this digit multiplies by: its neighbour's, squared seven times."""
        while len(self._factors) <= digit:
            factor = self._factors[-1]
            for _ in range(BITS):
                factor = factor * factor >> PRECISION
            self._factors.append(factor)
        return self._factors[digit]


recent_powers = functools.lru_cache(maxsize=RECENT)(Powers)


class Count(float):
    """A step number on the host."""

    def __rpow__(self, base: float, _: None = None) -> float:
        return recent_powers(float(base)).power(min(int(self), LAST))


class PowerTables:
    """The tables of one device, for one stream or graph: of the betas that the last step used, and no others."""

    def __init__(self) -> None:
        self._kept: dict[float, Tensor] = {}
        self._used: dict[float, Tensor] = {}
        self._digits: tuple[Tensor, Tensor] | None = None

    def of(self, base: float, device: torch.device) -> Tensor:
        if base not in self._used:
            known = self._kept.get(base)
            self._used[base] = sent(recent_powers(base).table(), device) if known is None else known
        return self._used[base]

    def digits(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """How far each digit is to be shifted, and where its line of a table begins; a column each."""
        if self._digits is None:
            digits = np.arange(DIGITS, dtype=np.int64)[:, None]
            self._digits = sent(BITS * digits, device), sent(BASE * digits, device)
        return self._digits

    def end_step(self) -> None:
        self._kept, self._used = self._used, {}

    def __len__(self) -> int:
        return len(self._kept.keys() | self._used.keys())


class DeviceCount(OnDevice):
    """Step numbers on a device, one for each parameter: float64, and known only there."""

    def __init__(self, numbers: Tensor, tables: PowerTables) -> None:
        self.numbers, self._tables = numbers, tables

    def __rpow__(self, base: float) -> Tensor:
        factors = self._tables.of(float(base), self.numbers.device).take(self._places)
        power: Tensor = functools.reduce(operator.mul, factors)
        return power

    @functools.cached_property
    def _places(self) -> Tensor:
        """Where in a table the factors of each number are: a line for each digit."""
        shifts, lines = self._tables.digits(self.numbers.device)
        whole = self.numbers.clamp(max=LAST).to(torch.int64)
        places: Tensor = (whole >> shifts & BASE - 1) + lines
        return places

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
