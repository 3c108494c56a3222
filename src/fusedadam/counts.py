"""Step numbers as scalars see them: ``beta ** step`` has the same bits on the host and on every device.

The power functions of C libraries and GPUs differ in the last bit; so would results, where a training goes on with
another machine, or where the counts move to the device (GradScaler, capturable). A power is therefore taken from two
tables, powers of beta and powers of beta**4096: a lookup in each and one multiplication, which is IEEE's everywhere.
The tables are made of integers, and rounded once.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fusedadam.transfer import sent
from fusedadam.words import divide

BITS = 12  # twice: as far as float32 counts
SIZE = 1 << BITS
LAST = SIZE * SIZE + SIZE - 1  # where the tables end; whoever comes later gets the last power
PRECISION = 128  # bits behind the point


@functools.lru_cache(maxsize=64)
def _powers(base: float) -> npt.NDArray[np.float64]:
    """One line with ``base`` to the powers 0 to 4096, one with ``base**4096`` to the same."""
    one = 1 << PRECISION
    numerator, denominator = base.as_integer_ratio()
    factor, lines = numerator * one // denominator, []
    for _ in range(2):
        powers = [one]
        for _ in range(SIZE):
            powers.append(powers[-1] * factor >> PRECISION)
        lines.append([power / one for power in powers])
        factor = powers[-1]
    return np.array(lines)


class Count(float):
    """A step number on the host."""

    def __rpow__(self, base: float, _: None = None) -> float:
        powers, number = _powers(float(base)), min(int(self), LAST)
        return float(powers[0, number & SIZE - 1]) * float(powers[1, number >> BITS])


Tables = dict[float, tuple[Tensor, Tensor]]


class DeviceCount:
    """Step numbers on a device, one for each parameter: float64, and known only there.

    ``tables`` belong to whoever calculates with them again and again, in one stream or graph.
    """

    def __init__(self, numbers: Tensor, tables: Tables) -> None:
        self.numbers, self._tables = numbers, tables

    def __rpow__(self, base: float) -> Tensor:
        if base not in self._tables:
            small, large = sent(_powers(float(base)), self.numbers.device)
            self._tables[base] = small, large
        (small, large), (low, high) = self._tables[base], self._parts
        return small.take(low) * large.take(high)

    @functools.cached_property
    def _parts(self) -> tuple[Tensor, Tensor]:
        whole = self.numbers.clamp(max=LAST).to(torch.int64)
        return whole & SIZE - 1, whole >> BITS

    def __truediv__(self, other: Any) -> Any:
        return divide(self.numbers, other)

    def __rtruediv__(self, other: Any) -> Any:
        return divide(other, self.numbers)


def _forward(name: str) -> None:
    """Whatever else a number can do, the tensor does."""
    function = getattr(operator, name)
    setattr(DeviceCount, f"__{name}__", lambda self, other: function(self.numbers, other))
    setattr(DeviceCount, f"__r{name}__", lambda self, other: function(other, self.numbers))


for _name in ("add", "sub", "mul", "lt", "le", "gt", "ge"):
    _forward(_name)
