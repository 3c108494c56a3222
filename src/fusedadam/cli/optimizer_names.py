"""What ``--optimizers`` takes: the names of this package's optimizers, and ``package.module:Class`` for any other.

A class travels between processes as its name. Each of them imports it anew, with the search path that the first one
has: multiprocessing hands it on.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusedadam.catalog import CATALOG
from fusedadam.contract.base import FusedOptimizer

ALL = "all"
Refused = argparse.ArgumentTypeError  # says why a name is not an optimizer that can be made, and what to write instead
HINT = "NAME may also be package.module:Class, an optimizer of your own (a FusedOptimizer)"


def optimizer_class(name: str) -> type[FusedOptimizer]:
    """The class of a name that :func:`parse` has accepted."""
    return CATALOG[name].cls if name in CATALOG else _imported(name)


def parse(text: str) -> str:
    """The type of ``--optimizers``."""
    if text != ALL and text not in CATALOG:
        _check_can_be_made(text, _imported(text))
    return text


def chosen(asked: Sequence[str]) -> list[str]:
    """Each name once, and for "all" every optimizer of this package."""
    return list(dict.fromkeys(one for name in asked for one in (CATALOG if name == ALL else (name,))))


@functools.cache
def _imported(text: str) -> type[FusedOptimizer]:
    module, _, name = text.partition(":")
    if not module or not name:
        raise Refused(
            f"{text!r} is not an optimizer of this package ({', '.join(CATALOG)}); for one of your own write "
            "package.module:Class"
        )
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:  # `python -m` has it already, the installed script has not
        sys.path.insert(0, here)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # with --json, standard output has nothing else
            found = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a script may end the process when it is imported
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module}.".startswith(f"{missing}."):
            raise Refused(
                f"{text!r}: there is no module {missing}; run this in the folder that has it, or install it"
            ) from None
        raise Refused(f"{text!r}: importing {module} raises {_in_one_line(error)}; correct it there") from None
    if not hasattr(found, name):
        known = [key for key, value in vars(found).items() if _is_optimizer(value) and key not in CATALOG]
        raise Refused(f"{text!r}: {module} has no {name}; its optimizers are {', '.join(known) or 'none'}")
    if not _is_optimizer(getattr(found, name)):
        raise Refused(f"{text!r} is not a class derived from fusedadam.FusedOptimizer; name one that is")
    made: type[FusedOptimizer] = getattr(found, name)
    return made


def _check_can_be_made(text: str, cls: type[FusedOptimizer]) -> None:
    given = list(inspect.signature(cls.__init__).parameters.values())[2:]  # after self and params
    required = [p.name for p in given if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if required:
        raise Refused(f"{text!r} needs more arguments than params: {', '.join(required)}; give each a default value")
    make: Callable[..., Any] = cls
    try:
        make([torch.nn.Parameter(torch.zeros(1, 1))])
    except Exception as error:
        raise Refused(f"{text!r} cannot be made with its default values: {_in_one_line(error)}; correct them") from None


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, FusedOptimizer) and value is not FusedOptimizer


def _in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".;")
