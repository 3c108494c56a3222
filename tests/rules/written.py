"""Rules that are written as text, a line or two each, in files that only linecache knows: what they say is one row of a
table."""

from __future__ import annotations

import itertools
import linecache
from typing import Any

import torch

from fusedadam.rules import clipping, ops, rule
from fusedadam.rules.rule import Rule

NAMES = {**vars(ops), **vars(clipping), **vars(rule), "torch": torch}
HELPERS = """def is_positive(x):
    return x > 0

def twice(x):
    return 2 * x

def both(x):
    return x > 0, x + 1

def norm_if(condition, x):
    return where(condition, sqrt(tensor_sum(x * x)), 1.0)

def one():
    return 1.0

"""
ARGUMENTS = "param: Value, grad: Value, m: Value, *, s: Scalar, f: Flag, g: Flag"
number = itertools.count()


def written(
    body: str, arguments: str = ARGUMENTS, returned: str = "param, m", helpers: str = HELPERS, reports: Any = ()
) -> Rule:
    """A rule with these lines."""
    text = f"{helpers}def made_up({arguments}) -> Values:\n"
    text += "".join(f"    {line}\n" for line in [*body.splitlines(), f"return {returned}"])
    filename = f"<rule {next(number)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    namespace = dict(NAMES, __name__="made_up")
    exec(compile(text, filename, "exec"), namespace)
    return rule.rule(scalars=lambda step: {"s": 1.0}, reports=reports)(namespace["made_up"])
