"""The API reference, from signatures and docstrings: the parts of docs/api/ that reference.py fills in.

Every public name has an entry: the names in ``__all__`` of ``fusedadam`` and of its public modules, the methods and
properties of the optimizers, and the functions that a rule may call.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from docstrings import below_assignments, cell, entries, markdown, paragraph, sections, summary, table

import fusedadam
from fusedadam import checks, functional, ops, schedules
from fusedadam.catalog import CATALOG
from fusedadam.contract import declarations
from fusedadam.contract.base import FusedOptimizer
from fusedadam.contract.reports import Reports
from fusedadam.rules import rule as rules

ROOT = Path(__file__).parents[1]
WIDTH = 100  # of a signature; longer ones are wrapped
TOLD = below_assignments(rules, declarations, schedules)  # aliases of types, and dicts

# For authors of optimizers: the checks that docs/rules.md names; the others serve our own optimizers
CHECKS = ("number", "finite", "fraction", "boolean", "betas", "one_of")
# Public in Python's sense, but called by the engine or by torch alone; declared; or torch's own, and unchanged
UNLISTED = ("profile_hook_step", "specialized", "storage_of", "value", "rule", "add_param_group", "zero_grad")
# The index: its headings, and the page and the parts that follow each
INDEX = {
    "Optimizers": ("optimizers.md", ["optimizers"]),
    "Methods and properties": ("optimizers.md", ["methods"]),
    "Functions": ("functions.md", ["functions", "functional", "schedules", "ascend"]),
    "For authors of optimizers": ("rules.md", ["authors", "ops", "checks"]),
}
MODULES = {
    "functional": "functions.md#functional",
    "schedules": "functions.md#schedules",
    "ops": "rules.md#functions-of-fusedadamops",
    "checks": "rules.md#checks-of-options",
    "ascend": "../ascend.md",
}


class Entry(NamedTuple):
    """``title``: in the index; ``heading``: on the page, above ``text``."""

    title: str
    heading: str
    says: str
    text: str


def api(part: str) -> str:
    if part == "names":
        return names()
    module = [body(getattr(fusedadam, part))] if part in ("functional", "schedules") else []
    return "\n\n".join([*module, *(f"### {entry.heading}\n{entry.text}" for entry in PARTS[part]())])


def names() -> str:
    """The index of all names."""
    tables = []
    for heading, (page, parts) in INDEX.items():
        rows = []
        for part in parts:
            if part in MODULES:
                module = importlib.import_module(f"fusedadam.{part}")
                rows.append(f"[`{part}`]({MODULES[part]}) | {summary(module)}")
            found = PARTS[part]() if part in PARTS else ()
            rows += [f"[`{e.title}`]({page}#{_anchor(e.heading)}) | {e.says}" for e in found]
        tables.append(f"## {heading}\n{table('name | what it is', rows)}")
    return "\n\n".join(tables)


def optimizers() -> Iterator[Entry]:
    for name in sorted(CATALOG, key=str.lower):
        made = CATALOG[name].cls
        own = [f"[`{found}`](#{_anchor(found)})" for owner, found, _ in _all_methods() if owner == name]
        also = f" Its own methods: {', '.join(own)}." if own else ""
        page = f"[Formula, arguments and cost](../optimizers/{CATALOG[name].page}.md).{also}"
        yield Entry(name, name, summary(made), f"{signature(name, made)}\n\n{paragraph(made)}\n\n{page}")


def methods() -> Iterator[Entry]:
    """Those of every optimizer first, then those that only some of them have."""
    for owner, name, value in _all_methods():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        is_property, is_common = isinstance(value, property), owner == FusedOptimizer.__name__
        call = _fenced(f"optimizer.{name}") if is_property else signature(f"optimizer.{name}", function)
        of = "" if is_common else f"Of [{owner}](#{_anchor(owner)}). "
        title = f"{'optimizer' if is_common else owner}.{name}"
        yield Entry(title, name, summary(function), f"{call}\n\n{of}{body(function)}")


def _all_methods() -> list[tuple[str, str, Any]]:
    """The class that defines it, the name, and the function or property."""
    found: dict[str, tuple[str, str, Any]] = {}
    for owner in (FusedOptimizer, *(CATALOG[name].cls for name in sorted(CATALOG))):
        own = {**vars(Reports), **vars(owner)} if owner is FusedOptimizer else vars(owner)
        for name, value in sorted(own.items()):
            is_method = callable(value) or isinstance(value, (property, classmethod))
            if is_method and not name.startswith("_") and name not in UNLISTED:
                found.setdefault(name, (owner.__name__, name, value))
    return list(found.values())


def functions() -> Iterator[Entry]:
    for name in fusedadam.__all__:
        value = getattr(fusedadam, name)
        if inspect.isfunction(value) and value is not fusedadam.rule:
            yield _entry(name, value, signature(f"fusedadam.{name}", value))


def authors() -> Iterator[Entry]:
    yield _entry("rule", rules.rule, _fenced("@rule(scalars=..., reports=(), opening=None)"))
    yield Entry("FusedOptimizer", "FusedOptimizer", summary(FusedOptimizer), body(FusedOptimizer))
    yield _entry("State", fusedadam.State, signature("State", fusedadam.State))
    yield _entry("NewtonSchulz", fusedadam.NewtonSchulz, signature("NewtonSchulz", fusedadam.NewtonSchulz))
    yield from (_told(name, getattr(fusedadam, name)) for name in TOLD if name in fusedadam.__all__)


def _entry(title: str, value: Any, call: str) -> Entry:
    return Entry(title, title, summary(value), f"{call}\n\n{body(value)}")


def _told(title: str, value: Any) -> Entry:
    says = markdown(TOLD[title.rpartition(".")[2]])
    keys = f" It has {', '.join(f'`{key}`' for key in value)}." if isinstance(value, Mapping) else ""
    return Entry(title, title, summary(says), re.sub(r"\s+", " ", says) + keys)


def _of_module(module: Any, prefix: str = "", only: Iterable[str] = ()) -> Iterator[Entry]:
    """``prefix``: of the names in signatures."""
    for name in only or module.__all__:
        title, value = f"{module.__name__.rpartition('.')[2]}.{name}", getattr(module, name)
        yield _told(title, value) if name in TOLD else _entry(title, value, signature(prefix + name, value))


PARTS: Mapping[str, Callable[[], Iterator[Entry]]] = {
    "optimizers": optimizers,
    "methods": methods,
    "functions": functions,
    "functional": lambda: _of_module(functional, "fusedadam.functional."),
    "schedules": lambda: _of_module(schedules, "fusedadam.schedules."),
    "authors": authors,
    "ops": lambda: _of_module(ops),
    "checks": lambda: _of_module(checks, only=CHECKS),
}


def signature(name: str, function: Callable[..., Any]) -> str:
    """With defaults and without annotations, which would take most of the page."""
    given = inspect.signature(function).parameters.values()
    kept = [p.replace(annotation=p.empty) for p in given if p.name not in ("self", "cls")]
    return _fenced(f"{name}{inspect.Signature(kept)}")


def _fenced(text: str) -> str:
    wrapped = textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_long_words=False)
    return "```\n" + "\n".join(wrapped) + "\n```"


def body(value: Any) -> str:
    """The docstring: prose, a table of arguments or attributes, and the example."""
    found = sections(value)
    parts = [markdown(found[""])]
    for title, kind in {"Args": "argument", "Attributes": "attribute"}.items():
        if title in found:
            rows = (f"`{'`, `'.join(listed)}` | {cell(markdown(text))}" for listed, text in entries(found[title]))
            parts.append(table(f"{kind} | meaning", rows))
    if "Example" in found:
        parts.append(f"```\n{_imports(found['Example'])}\n{found['Example']}\n```")
    return "\n\n".join(parts)


def _imports(example: str) -> str:
    """What a docstring takes for granted, so that the example runs when it is pasted."""
    used = {*re.findall(r"\b\w+", example)}
    lines = ["import torch"] if "torch" in used else []
    for module in (fusedadam, functional, schedules):
        names = sorted(used & {*module.__all__})
        lines += [f"from {module.__name__} import {', '.join(names)}"] if names else []
    return "\n".join(f">>> {line}" for line in lines)


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-")
