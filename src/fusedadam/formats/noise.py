"""Noise for stochastic rounding: a hash of where and when a value is stored, so that it is the same wherever it runs.

``where`` is the element's index in the whole parameter, row by row, in any sharding and layout; ``when`` is the step,
which with the seed makes the key. Nothing else enters: the same bits on every backend, for every sharding and grouping,
and after a resume.

    noise = mixed(index * SPREAD + key) * MULTIPLIERS[role]

The key is a hash of its own, so that over the steps every element's noise is uniform and independent. Between the
elements of a step a multiplication on each side of a shift is enough, since formats add upper bits only: neighbors
correlate by less than half a percent. Each role has a multiplier of its own, by its number among the roles that a rule
may store. A better hash would take longer than everything else that is done to a value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedadam.formats.format import Word

HALF = -(1 << 31)  # instead of noise, this rounds to nearest


def scramble(word: Word) -> Word:
    """For seeds and steps: every bit of the word changes every bit of the result (Chris Wellons's lowbias32)."""
    word = word ^ ((word >> 16) & 0xFFFF)
    word = word * 0x7FEB352D
    word = word ^ ((word >> 15) & 0x1FFFF)
    word = word * -2073254261  # 0x846CA68B
    return word ^ ((word >> 16) & 0xFFFF)


def step_key(step: Word, seed: Word) -> Word:
    return scramble(step + seed)


def mixed(word: Word) -> Word:
    return word ^ ((word >> 13) & 0x7FFFF)


def wrapped(number: int) -> int:
    """As a signed word."""
    return ((number + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


SPREAD = wrapped(0x9E3779B1)  # odd, near the golden ratio of the range
# Odd constants of other hashes. With these, neighbors, rows, steps and roles correlate by less than half a percent.
MULTIPLIERS = [*map(wrapped, (0x846CA68B, 0x297A2D39, 0x165667B1, 0xC2B2AE35, 0x27D4EB2F, 0x2C1B3C6D))]


def multiplier(role: str, roles: Sequence[str]) -> int:
    """Of a role among all roles of a rule; a seventh role would have the noise of the first."""
    return MULTIPLIERS[[r for r in roles if r != "grad"].index(role) % len(MULTIPLIERS)]


def seed_word(seed: int) -> int:
    """A seed of up to 64 bits as one word."""
    low, high = (torch.tensor(wrapped(part), dtype=torch.int32) for part in (seed, seed >> 32))
    return int(scramble(scramble(low) + high))
