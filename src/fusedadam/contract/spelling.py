"""Options that are misspelt in a group. torch keeps every key that it does not know, and so do we: schedulers and users
store things of their own there. A key that is nearly the name of an option is more likely a mistake, and is warned of.
"""

from __future__ import annotations

import difflib
import functools
import warnings
from collections.abc import Iterable

# A longer name leaves less room for another word: "betas" and "meta", "wd_ratio" and "lr_ratio" differ by two letters.
SHORTEST, LONG = 5, 10


def warn_of_misspelt(optimizer: str, keys: Iterable[object], options: Iterable[str]) -> None:
    """Warns once for each key that has no effect and is close to the name of an option."""
    known = list(options)
    for key in keys:
        if isinstance(key, str) and key not in known:
            meant = next((option for option in known if _is_misspelt(key, option)), None)
            if meant is not None:
                _warn_once(optimizer, key, meant)


def _is_misspelt(key: str, option: str) -> bool:
    if key.lower().replace("-", "_") == option:
        return True
    if len(option) < SHORTEST:
        return False
    if sorted(key) == sorted(option):  # letters in another order
        return True
    return _letters_off(key, option) <= (2 if len(option) >= LONG else 1)


def _letters_off(a: str, b: str) -> int:
    """How many letters are missing, extra or others."""
    changes = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in changes if kind != "equal")


@functools.cache
def _warn_once(optimizer: str, key: str, meant: str) -> None:
    warnings.warn(
        f"fusedadam: a group of {optimizer} has {key!r}, which is not an option and has no effect; did you mean "
        f"{meant!r}?",
        stacklevel=2,
    )
