"""An error or a warning says what to do, or a page does; and pages list only what the source says.

Messages are read from the source. An entry is the beginning of a message, in which "..." and words in capitals stand
for what differs from time to time.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import fusedadam

PACKAGE = Path(fusedadam.__file__).parent
DOCS = Path(__file__).parents[1] / "docs"
PAGES = (DOCS / "troubleshooting.md", DOCS / "api/rules.md")  # for users, and for authors of rules
GAP = "\N{WHITE SQUARE}"  # where a message has something that is only known at run time

# Functions that are handed a message by whoever has one, and which argument it is.
HANDED_ON = {"fail": 1, "refuse": 0, "_warn": 0, "_tell_once": 1, "not_captured": 0}
# Raised with words that are collected elsewhere: those that HANDED_ON is given, or one of these.
COLLECTED = {
    "RuntimeError(why)": "handed to checks.not_captured",
    "RuleError(f'rule {self.name} ({self.filename}:{line}): {why}')": "handed to Function.fail",
    "sentence": "handed to Function.refuse",
    "f'its scalars, {name}: {error}'": "said in tracing.py",
    "text": "handed to advice._tell_once",
    "f'fusedadam: {sentence}'": "handed to backends._warn",
    "ModuleNotFoundError(sentence(name))": "returned by missing.sentence",
    "AttributeError(missing.sentence(f'torch_npu.{name}'))": "returned by missing.sentence",
    "AttributeError(missing.sentence(f'torch_npu.optim.{name}'))": "returned by missing.sentence",
}
# Never seen by anybody as they are: caught inside, asked by Python itself, or shown in a command's usage or table.
UNSEEN = ("AttributeError(name)", "argparse.ArgumentTypeError(", "Failed(", "_Unknown(")
# How a message tells what to do: "...; use this", "it must be that"
REMEDY = re.compile(r"; |\bmust\b|\bneeds\b|pip install")
ENOUGH = 10  # letters that an entry must have, so that it says something


class Message(NamedTuple):
    where: str
    text: str


def messages() -> Iterator[Message]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield from messages_in(ast.parse(path.read_text(encoding="utf-8")), str(path.relative_to(PACKAGE)))


def messages_in(tree: ast.Module, where: str) -> Iterator[Message]:
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    known = {id(inner): function for function in functions for inner in ast.walk(function)}  # the innermost comes last
    for node in ast.walk(tree):
        place = f"{where}:{getattr(node, 'lineno', 0)}"
        function = known.get(id(node))
        for value in spoken(node, place):
            text = rendered(value, function)
            assert text.strip(GAP), f"{place}: what it says cannot be read from the source; put the words there"
            yield Message(place, text)


def spoken(node: ast.AST, place: str) -> Iterator[ast.expr]:
    """The expressions with words for the user in this statement or call, if there are any."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
        raised = ast.unparse(node.exc)
        if raised not in COLLECTED and not raised.startswith(UNSEEN):
            yield node.exc.args[0]
    elif isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        if name == "warn" and ast.unparse(node.args[0]) not in COLLECTED:
            yield node.args[0]
        elif name in HANDED_ON and ast.unparse(node.args[HANDED_ON[name]]) not in COLLECTED:
            yield node.args[HANDED_ON[name]]
    elif isinstance(node, ast.FunctionDef) and node.name == "sentence":
        yield from (inner.value for inner in ast.walk(node) if isinstance(inner, ast.Return) and inner.value)


def rendered(node: ast.expr, function: ast.AST | None) -> str:
    """The message, with gaps; a name that was given words in the same function stands for them."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(rendered(value, function) for value in node.values)
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name):
        return rendered(node.value, function)
    if isinstance(node, ast.Name) and function is not None:
        given = [
            n.value for n in ast.walk(function) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == node.id
        ]
        if len(given) == 1 and isinstance(given[0], (ast.Constant, ast.JoinedStr)):
            return rendered(given[0], function)
    return GAP


def entries(*pages: Path) -> list[str]:
    """What stands first in each item of the pages' lists: one message or several, as code."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages or PAGES)
    items = re.findall(r"^- (`.*`)$", text, re.MULTILINE)
    return [text.strip() for item in items for _, text in re.findall(r"(`+)(.+?)\1(?!`)", item)]


def pattern(entry: str) -> re.Pattern[str]:
    parts = re.split(r"\.\.\.|\b[A-Z][A-Z_]+\b", entry)
    return re.compile(".+".join(map(re.escape, parts)), re.DOTALL)


MESSAGES = list(messages())


def test_a_message_says_what_to_do_or_has_an_entry():
    patterns = [pattern(entry) for entry in entries()]
    without = [m for m in MESSAGES if not REMEDY.search(m.text) and not any(p.match(m.text) for p in patterns)]
    assert not without, f"say what to do after a semicolon, or in {PAGES[0].name}: {without}"


def test_no_entry_is_on_both_pages():
    users, authors = (set(entries(page)) for page in PAGES)
    assert users
    assert authors
    assert not users & authors


def test_an_entry_is_of_something_that_is_raised_or_warned_of():
    stale = [entry for entry in entries() if not any(pattern(entry).match(m.text) for m in MESSAGES)]
    assert not stale, "nothing says this any more; remove it from the page:\n" + "\n".join(stale)


def test_an_entry_says_enough_to_tell_messages_apart():
    assert not [entry for entry in entries() if len(re.sub(r"\b[A-Z_]+\b|[^A-Za-z]", "", entry)) < ENOUGH]


def test_the_messages_are_found():
    source = """
def f(why):
    where = "here"
    if x:
        raise ValueError(f"{where}: {y} is wrong")
    warnings.warn("careful", stacklevel=2)
    self.fail(node, "refused")
    raise Failed(1)
"""
    assert [m.text for m in messages_in(ast.parse(source), "f")] == [f"here: {GAP} is wrong", "careful", "refused"]
    with pytest.raises(AssertionError, match="cannot be read"):
        list(messages_in(ast.parse("raise ValueError(anything)"), "f"))
    assert len(MESSAGES) > 100
