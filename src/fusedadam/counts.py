"""Step numbers as scalars see them: ``beta ** step`` has the same bits on the host and on every device.

The power functions of C libraries and GPUs differ in the last bit; so would results, where a training goes on with
another machine, or where the counts move to the device (GradScaler, capturable). A power is therefore taken from two
tables, powers of beta and powers of beta**4096: a lookup in each and one multiplication, which is IEEE's everywhere.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fusedadam.transfer import keep_for_graph, sent

BITS = 12  # twice: as far as float32 counts
SIZE = 1 << BITS
LAST = SIZE * SIZE + SIZE - 1  # a power of any later step is the same: 0, or as good as 0


@functools.lru_cache(maxsize=64)
def _powers(base: float) -> npt.NDArray[np.float64]:
    """One line with ``base`` to the powers 0 to 4096, one with ``base**4096`` to the same."""
    small = np.multiply.accumulate(np.concatenate([[1.0], np.full(SIZE, base)]))  # one after the other
    large = np.multiply.accumulate(np.concatenate([[1.0], np.full(SIZE, small[-1])]))
    return np.stack([small, large])


class Count(float):
    """A step number on the host."""

    def __rpow__(self, base: float, _: None = None) -> float:
        powers, number = _powers(float(base)), min(int(self), LAST)
        return float(powers[0, number & SIZE - 1]) * float(powers[1, number >> BITS])


class DeviceCount:
    """Step numbers on a device, one for each parameter: float64, and known only there."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def __rpow__(self, base: float) -> Tensor:
        small, large = map(keep_for_graph, _powers_on(self.numbers.device, float(base)))
        low, high = self._parts
        return small.take(low) * large.take(high)

    @functools.cached_property
    def _parts(self) -> tuple[Tensor, Tensor]:
        whole = self.numbers.to(torch.int64)
        return whole & SIZE - 1, whole >> BITS

    def __add__(self, other: float) -> Tensor:
        return self.numbers + other

    __radd__ = __add__

    def __sub__(self, other: float) -> Tensor:
        return self.numbers - other


@functools.lru_cache(maxsize=64)
def _powers_on(device: torch.device, base: float) -> tuple[Tensor, Tensor]:
    small, large = sent(_powers(base), device)
    return small, large
