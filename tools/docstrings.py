"""Docstrings as Markdown: prose first, then a list of ``Args:`` or ``Attributes:``, then an ``Example:``.

What cannot have a docstring, such as an alias of a type or a dict, has a string below its assignment instead.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterable
from types import ModuleType
from typing import Any


def sections(value: Any) -> dict[str, str]:
    """The parts of a docstring by their titles; "" is the prose."""
    doc = inspect.getdoc(value)
    if not doc:
        raise ValueError(f"{value} has no docstring")
    prose, *rest = re.split(r"^(Args|Attributes|Example):\n", doc, flags=re.MULTILINE)
    titled = zip(rest[::2], map(textwrap.dedent, rest[1::2]), strict=True)
    return {"": prose.strip()} | {title: text.strip() for title, text in titled}


def entries(listed: str) -> list[tuple[list[str], str]]:
    """The names and the description of each line of ``Args:`` or ``Attributes:``."""
    split = (entry.partition(": ") for entry in re.split(r"\n(?=\S)", listed))
    return [(names.split(", "), _in_one_line(text)) for names, _, text in split]


def below_assignments(*modules: ModuleType) -> dict[str, str]:
    """The strings below assignments, by the assigned name."""
    found = {}
    for module in modules:
        body = ast.parse(inspect.getsource(module)).body
        for node, after in itertools.pairwise(body):
            is_string = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if is_string and isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = inspect.cleandoc(after.value.value)
    return found


def paragraph(value: Any) -> str:
    """The first one of a docstring, or of a text."""
    doc = value if isinstance(value, str) else inspect.getdoc(value) or ""
    return markdown(doc.split("\n\n")[0])


def summary(value: Any) -> str:
    """The first sentence of a docstring, or of a text, without its full stop."""
    return cell(re.split(r"\.(?: |$)", _in_one_line(paragraph(value)))[0].rstrip(":"))


def markdown(text: str) -> str:
    text = re.sub(r"`([^`<]+) <(https?:[^>]+)>`_", r"[\1](\2)", text)
    text = re.sub(r":math:`([^`]*)`", r"$\1$", text)
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text)
    return text.replace("``", "`").replace(" (docs/rules.md)", "")


def cell(text: str) -> str:
    return text.replace("|", r"\|")


def table(header: str, rows: Iterable[str]) -> str:
    """``header`` and each row: cells, divided by ``|``."""
    return "\n".join([f"| {header} |", "|---" * len(header.split(" | ")) + "|", *(f"| {row} |" for row in rows)])


def _in_one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
