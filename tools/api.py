"""The API reference, from signatures and docstrings: the parts of docs/api/ that reference.py fills in.

Every public name has an entry: the names in ``__all__`` of ``fusedadam`` and of its public modules, the methods and
properties of the optimizers, the functions that a rule may call, and every message of a RuleError.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fusedadam
from fusedadam import checks, functional, ops, schedules
from fusedadam.contract.base import FusedOptimizer

ROOT = Path(__file__).parents[1]
WIDTH = 100  # of a signature; longer ones are wrapped

# For authors of optimizers: the checks that docs/rules.md names; the others serve our own optimizers
CHECKS = (checks.number, checks.finite, checks.fraction, checks.boolean, checks.betas, checks.one_of)
# Names without a docstring for users: aliases of types, dicts, the base class
SAYS = {
    "FusedOptimizer": "The base class of every optimizer; a subclass declares its rule, states and options.",
    "Value": "Annotates a role of a rule: `param`, `grad`, or a state. The code reads as for one element.",
    "RowValue": "Annotates a state that leaves out the parameter's last dimension: one value for each row of a matrix.",
    "ColumnValue": "Annotates a state that leaves out the second-to-last dimension: one value for each column.",
    "TensorValue": "Annotates a state with one value for each parameter.",
    "Scalar": "Annotates a number that is the same for all elements of a parameter; the rule's scalars compute it.",
    "Flag": "Annotates a choice that is made when the kernel is compiled; `if` asks it.",
    "Values": "Annotates what a rule returns: the roles to store.",
    "OPTIONS": "The options of every optimizer, and the check of each. A class adds its own: "
    '`options = OPTIONS | {"betas": checks.betas}`.',
    "DERIVED": "The flags and hyper-parameters that follow from options, and the function that computes each. "
    'A class adds its own: `derived = DERIVED | {"cosine": lambda group: group["schedule"] == "cosine"}`.',
}
# What a class may declare; docs/rules.md explains each
DECLARED = {
    "rule": "the function under `@rule(...)`",
    "states": "the name of each state, and its `State`",
    "options": "the name of each option, and its check",
    "derived": "flags and hyper-parameters that are computed from a group's options",
    "fixed": "flags with the same value in every group",
    "also_called": "another package's name of a state, and ours, so that its state dicts load",
    "takes_complex": "whether it takes complex parameters, whose parts it updates as two real numbers",
    "step_if_uncounted": "the step of a loaded state that has none; None refuses it",
}
# Public in Python's sense, but called by the engine or by torch alone
INTERNAL = ("profile_hook_step", "specialized", "storage_of", "value")
# torch.optim.Optimizer's own, which work unchanged
OF_TORCH = ("add_param_group", "zero_grad")


def api(what: str) -> str:
    return {
        "names": names,
        "optimizers": optimizers,
        "methods": methods,
        "functions": functions,
        "authors": authors,
        "ops": operations,
        "checks": options_checks,
        "errors": errors,
    }[what]()


# the list of all names


def names() -> str:
    by_page: dict[str, list[str]] = {}
    for name in sorted(fusedadam.__all__, key=str.lower):
        page = page_of(name)
        by_page.setdefault(page.partition(".")[0], []).append(
            _row(name, page, _summary(name, getattr(fusedadam, name)))
        )
    for module, page in ((functional, "functions"), (schedules, "functions"), (ops, "rules")):
        for name in module.__all__:
            title = f"{module.__name__.rpartition('.')[2]}.{name}"
            by_page[page].append(_row(title, f"{page}.md#{_anchor(title)}", _first(getattr(module, name))))
    titles = [(f"checks.{check.__name__}", check) for check in CHECKS]
    by_page["rules"] += [_row(title, f"rules.md#{_anchor(title)}", _first(check)) for title, check in titles]
    by_page["methods"] = []
    for owner, name, value in _all_methods():
        title = f"{'optimizer' if owner == 'FusedOptimizer' else owner}.{name}"
        by_page["methods"].append(_row(title, f"optimizers.md#{_anchor(name)}", _first(value)))
    by_page["functions"].append(_row("fusedadam.ascend", "../ascend.md", _first(fusedadam.ascend)))
    headings = {"optimizers": "Optimizers", "methods": "Methods and properties", "functions": "Functions"}
    headings["rules"] = "For authors of optimizers"
    return "\n\n".join(
        "\n".join([f"## {heading}", "| name | what it is |", "|---|---|", *by_page[page]])
        for page, heading in headings.items()
    )


def _row(title: str, link: str, says: str) -> str:
    return f"| [`{title}`]({link}) | {says} |"


def page_of(name: str) -> str:
    value = getattr(fusedadam, name)
    if is_optimizer(value):
        return f"optimizers.md#{_anchor(name)}"
    if name in ("functional", "schedules"):
        return f"functions.md#{name}"
    if name in SAYS or name in ("State", "FusedOptimizer", "rule"):
        return f"rules.md#{_anchor(name)}"
    if name in ("ops", "checks"):
        return f"rules.md#{ {'ops': 'functions-of-fusedadamops', 'checks': 'checks-of-options'}[name] }"
    return f"functions.md#{_anchor(name)}"


def is_optimizer(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, FusedOptimizer) and value is not FusedOptimizer


# optimizers


def optimizers() -> str:
    made = [name for name in fusedadam.__all__ if is_optimizer(getattr(fusedadam, name))]
    parts = []
    for name in sorted(made, key=str.lower):
        own = [found for owner, found, _ in _all_methods() if owner == name]
        also = f" Its own methods: {', '.join(f'[`{m}`](#{_anchor(m)})' for m in own)}." if own else ""
        made_by = getattr(fusedadam, name)
        parts.append(
            f"### {name}\n{_fenced(signature(name, made_by))}\n\n{_paragraph(made_by)}\n\n"
            f"[Formula, arguments and cost](../optimizers/{page_name(name)}.md).{also}"
        )
    return "\n\n".join(parts)


def page_name(name: str) -> str:
    for path in (ROOT / "docs/optimizers").glob("*.md"):
        if path.read_text(encoding="utf-8").startswith(f"# {name}\n"):
            return path.stem
    raise ValueError(f"{name} has no page in docs/optimizers/")


def methods() -> str:
    """Those of every optimizer first, then those that only some of them have."""
    parts = []
    for owner, name, value in _all_methods():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        call = f"optimizer.{name}" if isinstance(value, property) else signature(f"optimizer.{name}", function)
        of = "" if owner == "FusedOptimizer" else f"Of [{owner}](#{_anchor(owner)}). "
        parts.append(f"### {name}\n{_fenced(call)}\n\n{of}{body(function)}")
    return "\n\n".join(parts)


def _all_methods() -> list[tuple[str, str, Any]]:
    """The class that defines it, the name, and the function or property."""
    classes = [FusedOptimizer, *(v for n in fusedadam.__all__ if is_optimizer(v := getattr(fusedadam, n)))]
    found: dict[str, tuple[str, str, Any]] = {}
    for owner in classes:
        for name, value in sorted(vars(owner).items()):
            is_public = not name.startswith("_") and name not in INTERNAL and name not in OF_TORCH
            if is_public and (callable(value) or isinstance(value, (property, classmethod))) and name not in DECLARED:
                found.setdefault(name, (owner.__name__, name, value))
    return list(found.values())


# functions


def functions() -> str:
    others = [n for n in fusedadam.__all__ if page_of(n) == f"functions.md#{_anchor(n)}"]
    parts = ["## fusedadam"]
    parts += [_function(n, value) for n in others if inspect.isfunction(value := getattr(fusedadam, n))]
    for module, title in ((functional, "functional"), (schedules, "schedules")):
        parts.append(f"## {title}\n{_markdown(_before_examples(module))}")
        parts += [
            _function(f"{title}.{name}", getattr(module, name))
            for name in module.__all__
            if callable(getattr(module, name))
        ]
    parts.append(f"### schedules.SCHEDULES\nThe schedules by name: {', '.join(f'`{n}`' for n in schedules.SCHEDULES)}.")
    return "\n\n".join(parts)


def _function(title: str, function: Callable[..., Any]) -> str:
    return f"### {title}\n{_fenced(signature(f'fusedadam.{title}', function))}\n\n{body(function)}"


# for authors of optimizers


def authors() -> str:
    state = inspect.signature(fusedadam.State)
    declared = "\n".join(f"| `{name}` | {says} |" for name, says in DECLARED.items())
    parts = [
        f"### rule\n{_fenced('@rule(scalars=..., reports=())')}\n\n{body(fusedadam.rule)}",
        "### FusedOptimizer\nThe base class. A subclass declares:\n\n"
        f"| attribute | meaning |\n|---|---|\n{declared}\n\n"
        "Its `__init__` passes every option on: `super().__init__(params, lr=lr, ...)`. "
        "[The methods](optimizers.md#methods-and-properties) are those of every optimizer.",
        f"### State\n{_fenced(f'State{_plain(state)}')}\n\n{body(fusedadam.State)}",
    ]
    for name, says in SAYS.items():
        value = getattr(fusedadam, name)
        keys = f" It has {', '.join(f'`{key}`' for key in value)}." if isinstance(value, Mapping) else ""
        if name != "FusedOptimizer":
            parts.append(f"### {name}\n{says}{keys}")
    return "\n\n".join(parts)


def operations() -> str:
    return "\n\n".join(
        f"### ops.{name}\n{_fenced(_bare(name, getattr(ops, name)))}\n\n{body(getattr(ops, name))}"
        for name in ops.__all__
    )


def options_checks() -> str:
    return "\n\n".join(
        f"### checks.{check.__name__}\n{_fenced(_bare(check.__name__, check))}\n\n{body(check)}" for check in CHECKS
    )


def errors() -> str:
    """Every message, with its cause and remedy, as docs/troubleshooting.md has them."""
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    parts = []
    for title in ("Writing a rule", "Writing an optimizer"):
        section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0].strip()
        section = section.replace("](rules.md", "](../rules.md").replace("](#writing-a-rule)", "](#a-rule)")
        parts.append(f"### {title.replace('Writing', '').strip().capitalize()}\n{section}")
    return "\n\n".join(parts)


# signatures and docstrings as Markdown


def signature(name: str, function: Callable[..., Any]) -> str:
    """With defaults and without annotations, which would take most of the page."""
    given = inspect.signature(function)
    return f"{name}{_plain(given)}"


def _bare(name: str, function: Callable[..., Any]) -> str:
    return f"{name}({', '.join(str(_unannotated(p)) for p in inspect.signature(function).parameters.values())})"


def _plain(given: inspect.Signature) -> str:
    kept = [_unannotated(p) for n, p in given.parameters.items() if n not in ("self", "cls")]
    return str(inspect.Signature(kept))


def _unannotated(parameter: inspect.Parameter) -> inspect.Parameter:
    return parameter.replace(annotation=inspect.Parameter.empty)


def _fenced(text: str) -> str:
    wrapped = textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_long_words=False)
    return "```\n" + "\n".join(wrapped) + "\n```"


def body(function: Any) -> str:
    """The docstring: prose, a table of arguments, and the example."""
    prose, arguments, example = _sections(function)
    parts = [_markdown(prose.strip())]
    if arguments:
        rows = [f"| `{name}` | {text} |" for name, text in arguments]
        parts.append("\n".join(["| argument | meaning |", "|---|---|", *rows]))
    if example:
        parts.append(f"```\n{_imports(example)}\n{example}\n```")
    return "\n\n".join(parts)


def _imports(example: str) -> str:
    """What a docstring takes for granted, so that the example runs when it is pasted."""
    used = {*re.findall(r"\b\w+", example)}
    lines = ["import torch"] if "torch" in used else []
    for module in (fusedadam, functional, schedules):
        names = sorted(used & {*module.__all__})
        lines += [f"from {module.__name__} import {', '.join(names)}"] if names else []
    return "\n".join(f">>> {line}" for line in lines)


def _sections(function: Any) -> tuple[str, list[tuple[str, str]], str]:
    doc = inspect.getdoc(function)
    if not doc:
        raise ValueError(f"{function} has no docstring")
    prose, _, rest = doc.partition("\nArgs:\n")
    if not rest:
        prose, _, example = doc.partition("\nExample:\n")
        return prose, [], textwrap.dedent(example).strip()
    listed, _, example = rest.partition("\nExample:\n")
    entries = []
    for entry in re.split(r"\n(?=\S)", textwrap.dedent(listed).strip()):
        name, _, text = entry.partition(": ")
        entries.append((name.replace(", ", "`, `"), _markdown(re.sub(r"\s+", " ", text)).replace("|", r"\|")))
    return prose, entries, textwrap.dedent(example).strip()


def _before_examples(module: Any) -> str:
    return re.split(r"\n\s+>>>", inspect.getdoc(module) or "")[0].strip()


def _paragraph(value: Any) -> str:
    return _markdown((inspect.getdoc(value) or "").split("\n\n")[0])


def _summary(name: str, value: Any) -> str:
    return SAYS[name].split(". ")[0].rstrip(".") if name in SAYS else _first(value)


def _first(value: Any) -> str:
    """The first sentence of a docstring, without its full stop."""
    if isinstance(value, Mapping):
        return "BertAdam's schedules by name"
    text = re.sub(r"\s+", " ", _markdown((inspect.getdoc(value) or "").split("\n\n")[0]))
    return re.split(r"\.(?: |$)", text)[0].rstrip(":").replace("|", r"\|")


def _markdown(text: str) -> str:
    text = re.sub(r"`([^`<]+) <(https?:[^>]+)>`_", r"[\1](\2)", text)
    text = re.sub(r":math:`([^`]*)`", r"$\1$", text)
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text)
    return text.replace("``", "`").replace(" (docs/rules.md)", "")


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-")
