"""Noise for stochastic rounding: a hash of where and when a value is stored, so that it is the same wherever it runs.

``where`` is the element's index in the whole parameter, row by row, in any sharding and layout; ``when`` is the step,
which with the seed makes the key. Nothing else enters: the same bits on every backend, for every sharding and grouping,
and after a resume.

Each role takes its own noise, by its number among the roles that a rule may store. A hash takes longer than everything
else that is done to a value, and formats add the upper bits of a word: so three roles share the 32 bits of a hash, each
with another third uppermost. Below these 10 bits or more the noise of one role is that of another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedadam.tensors.formats.format import Word

HALF = -(1 << 31)  # instead of noise, this rounds to nearest
SHARE = 3  # roles that have a hash in common
TURN = 11  # bits between their shares
NEXT_HASH = 0x9E3779B9 - (1 << 32)  # between the keys of two hashes; any odd number without a pattern


def scramble(word: Word) -> Word:
    """Every bit of the word changes the upper bits of the result with a chance of one half, or nearly so.

    This is Chris Wellons's lowbias32 without its first step, which is for words that differ in their upper bits alone:
    ours differ by an index, or by a key that was scrambled before. Where indices follow each other, the first
    multiplication becomes an addition.
    """
    word = word * 0x7FEB352D
    word = word ^ ((word >> 15) & 0x1FFFF)
    word = word * -2073254261  # 0x846CA68B
    return word ^ ((word >> 16) & 0xFFFF)


def step_key(step: Word, seed: Word) -> Word:
    return scramble(step + seed)


def turn_1(word: Word) -> Word:
    return (word << 11) | ((word >> 21) & 0x7FF)


def turn_2(word: Word) -> Word:
    return (word << 22) | ((word >> 10) & 0x3FFFFF)


TURNS = (None, turn_1, turn_2)


def hash_and_share(role: str, roles: Sequence[str]) -> tuple[int, int]:
    """Which hash a role of a rule has its noise from, and which share of it."""
    return divmod([r for r in roles if r != "grad"].index(role), SHARE)


def hash_key(number: int) -> int:
    """What a hash adds to the step's key."""
    return wrapped(number * NEXT_HASH)


def seed_word(seed: int) -> int:
    """A seed of up to 64 bits as one word."""
    low, high = (torch.tensor(wrapped(part), dtype=torch.int32) for part in (seed, seed >> 32))
    return int(scramble(scramble(low) + high))


def wrapped(number: int) -> int:
    """As a signed word."""
    return ((number + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)
