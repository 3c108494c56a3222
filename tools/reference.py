"""Writes the generated parts of the documents, from code and measured figures: `python tools/reference.py`.

A generated part is between two comments; the first says what to generate:

    <!-- made by tools/reference.py: arguments AdamW -->
    ...
    <!-- end -->

Formulas and arguments come from docstrings, memory traffic from the rules, names of Ascend's packages from the
stand-ins, and figures from docs/performance.md.
`--check` writes nothing and fails if a document is out of date; the tests do the same.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from api import api
from docstrings import cell, entries, markdown, sections, summary, table
from figures import figures, in_words

import fusedadam
from fusedadam import ascend
from fusedadam.ascend import aclnn, amp, on_cpu
from fusedadam.ascend import npu as npu_module
from fusedadam.ascend.missing import REPLACEMENTS
from fusedadam.catalog import CATALOG
from fusedadam.contract.base import FusedOptimizer
from fusedadam.formats import compute_dtype
from fusedadam.rules.rule import PARAM_FLAGS

ROOT = Path(__file__).parents[1]
PART = re.compile(
    r"(?P<begin><!-- made by tools/reference\.py: (?P<what>[a-z]+)(?: (?P<about>\S+))? -->\n)(?P<text>.*?)"
    r"(?P<end><!-- end -->)",
    re.DOTALL,
)
# the dtypes of parameters and states; None: the parameter's own
MIXES = [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)]

SIDE = 1024  # of the matrices, and the length of the vectors, whose bytes are counted


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python tools/reference.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a document is out of date")
    options = parser.parse_args(arguments)
    stale = [path for path in documents() if filled(path) != path.read_text(encoding="utf-8")]
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is out of date' if options.check else 'written'}")
        if not options.check:
            path.write_text(filled(path), encoding="utf-8")
    return int(options.check and bool(stale))


def documents() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]


def filled(path: Path) -> str:
    """The document with its generated parts up to date."""

    def part(found: re.Match[str]) -> str:
        made = PARTS[found["what"]](*([found["about"]] if found["about"] else []))
        return f"{found['begin']}{made}\n{found['end']}"

    return PART.sub(part, path.read_text(encoding="utf-8"))


# formulas and arguments, from docstrings


def formula(name: str) -> str:
    """Each formula on its own line: long rows do not fit on a phone."""
    found = re.search(r"\.\. math::\n(.*?)\n\n", inspect.getdoc(getattr(fusedadam, name)) or "", re.DOTALL)
    if not found:
        raise ValueError(f"the docstring of {name} has no formula")
    pieces = [piece.strip(" ,\n") for piece in re.sub(r"\s+", " ", found[1]).split(r"\quad")]
    lines, words = [], ""
    for piece in pieces:
        if piece.startswith(r"\text"):
            words = rf"{piece} \; "
        else:
            lines.append(f"$$\n{words}{piece}\n$$")
            words = ""
    return "\n" + "\n\n".join(lines) + "\n"


def arguments(name: str) -> str:
    owner = _public(name)
    parameters = {n: p for n, p in inspect.signature(owner).parameters.items() if n != "self"}
    described = _described(name)
    if set(described) != set(parameters):
        raise ValueError(f"{name} takes {sorted(parameters)}, but its docstring describes {sorted(described)}")
    rows = []
    for argument, parameter in parameters.items():
        default = "" if parameter.default is parameter.empty else f"`{parameter.default!r}`"
        rows.append(f"`{argument}` | {default} | {described[argument]}")
    by_keyword = next((n for n, p in parameters.items() if p.kind == p.KEYWORD_ONLY), None)
    note = f"\n\n`{by_keyword}` and the arguments after it are keyword-only." if by_keyword is not None else ""
    return table("argument | default | meaning", rows) + note


def _public(name: str) -> Any:
    found = getattr(fusedadam, name, None) or getattr(fusedadam.functional, name, None) or getattr(ascend, name, None)
    if found is None:
        raise ValueError(f"{name} is not a public name")
    return found


def _described(name: str) -> dict[str, str]:
    """The description of each argument; "as for" another class is resolved to that class's description."""
    listed = sections(_public(name)).get("Args")
    if listed is None:
        raise ValueError(f"the docstring of {name} does not describe its arguments")
    described: dict[str, str] = {}
    for names, text in entries(listed):
        elsewhere = re.fullmatch(r"as for :\w+:`(\w+)`", text)
        described |= {name: _described(elsewhere[1])[name] if elsewhere else cell(markdown(text)) for name in names}
    return described


# bytes that a step moves, from the rule


def cost(name: str) -> str:
    """The cost table of one optimizer, for the options that change it."""
    rows = []
    for words, options, shape in variants(name):
        both = (bytes_a_parameter(name, options, shape, *dtypes) for dtypes in MIXES)
        cells = (f"{_digits(moved)} moved, {_digits(kept)} kept" for moved, kept in both)
        rows.append(" | ".join([words, *cells]))
    return table("bytes a parameter | in float32 | in bfloat16 | in bfloat16, moments in float32", rows)


def variants(name: str) -> list[tuple[str, Mapping[str, Any], tuple[int, ...]]]:
    """What differs in bytes moved: a label, options, and the shape of a parameter."""
    entry = CATALOG[name]
    labels = [", ".join(f"{option}={value!r}" for option, value in options.items()) for options in entry.costs]
    if not PARAM_FLAGS.keys() & set(entry.cls.rule.flags):
        own = [f"`{label}`" if label else "default options" for label in labels]
        return [(label, options, (SIDE,)) for label, options in zip(own, entry.costs, strict=True)]
    own = [f"with `{label}`" if label else f"matrices of {SIDE:,} by {SIDE:,}" for label in labels]
    matrices = [(label, options, (SIDE, SIDE)) for label, options in zip(own, entry.costs, strict=True)]
    of_vectors = {"use_muon": False} if entry.matrices else {}
    return [*matrices, ("biases, other vectors", of_vectors, (SIDE,))]


def costs() -> str:
    rows = []
    for name, entry in CATALOG.items():
        _, options, shape = variants(name)[0]
        both = [bytes_a_parameter(name, options, shape, *dtypes) for dtypes in MIXES[:2]]
        moved, kept = zip(*both, strict=True)
        rows.append(" | ".join([f"[{name}]({entry.page}.md)", *map(_digits, (*moved, *kept))]))
    return table("optimizer | a step moves: float32 | bfloat16 | state: float32 | bfloat16", rows)


def which() -> str:
    """Which optimizer for what."""
    rows = [f"{one.when} | [{one.name}]({one.page}.md) | {one.because}" for one in CATALOG.values()]
    return table("you train | use | because", rows)


def _digits(count: float) -> str:
    """Three digits: a state by row adds next to nothing to an element."""
    return f"{count:.3g}"


def bytes_a_parameter(
    name: str, options: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype, state_dtype: torch.dtype | None
) -> tuple[float, float]:
    """Bytes per element that a step reads and writes, and that the optimizer keeps."""
    param = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    optimizer: FusedOptimizer = getattr(fusedadam, name)([param], state_dtype=state_dtype, **options)
    group = optimizer.param_groups[0]
    specialized = optimizer.specialized(group, param)
    sizes: dict[str, float] = {"param": dtype.itemsize, "grad": dtype.itemsize}
    for state in specialized.states:
        made = optimizer.states[state].new(param, group)
        sizes[state] = made.element_size() * made.numel() / param.numel()
    if specialized.product is not None:
        sizes[specialized.product.name] = compute_dtype(dtype).itemsize
    visits = [role for stage in specialized.stages for role in (*stage.reads, *stage.writes) if role in sizes]
    return sum(sizes[role] for role in visits), sum(sizes[state] for state in specialized.states)


# rules, from their source


def rule(name: str) -> str:
    """The body of the rule, and of its opening, as in the source."""
    update, opening = getattr(fusedadam, name).rule.update, getattr(fusedadam, name).rule.opening
    bodies = [_body(function) for function in (opening, update) if function is not None]
    return "\n".join(["```", *bodies, "```"])


def _body(function: Callable[..., Any]) -> str:
    lines = inspect.getsource(function).splitlines()
    tree = ast.parse(textwrap.dedent("\n".join(lines))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    body = [node for node in tree.body if not isinstance(node, (ast.Return, ast.Expr))]  # nor a docstring
    return textwrap.dedent("\n".join(lines[body[0].lineno - 1 : body[-1].end_lineno]))


# what scripts for Ascend find, from the stand-in packages


def provided(package: str) -> str:
    """A row for each name that a stand-in package exports."""
    rows = []
    with warnings.catch_warnings(), ascend.install("cpu"):
        root = importlib.import_module(package)
        inside = pkgutil.walk_packages(root.__path__, f"{package}.")
        for module in (root, *(importlib.import_module(found.name) for found in inside)):
            for name in getattr(module, "__all__", ()):
                if not inspect.ismodule(getattr(module, name)):
                    rows.append(f"`{module.__name__}.{name}` | {summary(getattr(module, name))}")
    return table("name | what it is here", rows)


def cann() -> str:
    names = [name for name in aclnn.__all__ if name.startswith("acl")]
    return table("name | what it is here", (f"`{name}` | {summary(getattr(aclnn, name))}" for name in names))


def npu() -> str:
    """The names of torch.npu where "npu" means the CPU, in a row for each description."""
    ours = {name: value for module in (on_cpu, npu_module) for name, value in vars(module).items()}
    rows = []
    for name, value in sorted(ours.items()):
        is_own = getattr(value, "__module__", "") in (npu_module.__name__, on_cpu.__name__)
        if is_own and not name.startswith("_"):
            on_gpu = "the same" if name in vars(npu_module) else "`torch.cuda`'s"
            rows.append((name, f"{on_gpu} | {summary(value) or 'works'}"))
    rows += [(f"amp.{name}", f"the same | {summary(getattr(amp, name))}") for name in amp.__all__]
    compilers = "the same | accepted, with one warning: it configures Ascend's compiler"
    rows += [(name, compilers) for name in (*npu_module.SWITCHES, *npu_module.SETTINGS)]
    return table("`torch.npu.` | on a GPU | on a CPU", _joined(rows))


def missing() -> str:
    """The names that are not provided, in a row for each replacement."""
    return table("not provided | use instead", _joined(REPLACEMENTS.items()))


def _joined(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """A row for each description, with all of its names."""
    names: dict[str, list[str]] = {}
    for name, description in rows:
        names.setdefault(description, []).append(f"`{name}`")
    return (f"{', '.join(listed)} | {description}" for description, listed in names.items())


# measured figures

# Rows of docs/performance.md, and their titles for readers who do not know our sets of parameters
MEASURED = {
    "AdamW fp32, llama: 940.6M in 37 tensors": "H200: AdamW, 941M parameters",
    'AdamW bf16, `storage="8bit"`, llama': "H200: AdamW in 8 bits, 941M",
    "AdamW fp32, `max_grad_norm=1`, llama": "H200: AdamW with clipping, 941M",
    "AdamP fp32, gpt": "H200: AdamP, 124M parameters",
    "Muon fp32, llama's 28 matrices": "H200: Muon, a llama's 28 matrices",
}
ON_CPU = "| AdamW fp32, 33.5M |"  # and a row where the peer is a fused kernel, too
AS_FAST = "| H200: RAdam fp32, llama (a run of its own) |"


def measured() -> str:
    rows = []
    known = figures()
    for what, title in MEASURED.items():
        ours, _, peer, theirs, times = known[what]
        rows.append(f"{title} | {in_words(ours)} ms | {in_words(theirs)} ms, {peer} | {times}")
    _, ours, peer, theirs, times = _row_of_performance(ON_CPU)
    rows.append(f"2 CPU cores: AdamW, 33.5M parameters | {ours} ms | {theirs} ms, {peer} | {times}")
    _, ours, _, theirs, times = _row_of_performance(AS_FAST)
    rows.append(f"H200: RAdam, 941M parameters | {ours} | {theirs}, optimi (a Triton kernel) | {times}")
    return table("one `optimizer.step()` | fusedadam | baseline | times as fast", rows)


def _row_of_performance(begins: str) -> list[str]:
    lines = (ROOT / "docs/performance.md").read_text(encoding="utf-8").splitlines()
    return [cell.strip() for cell in next(line for line in lines if line.startswith(begins)).strip("|").split("|")]


PARTS: Mapping[str, Callable[..., str]] = {
    made.__name__: made
    for made in (formula, arguments, cost, costs, which, rule, provided, cann, npu, missing, measured, api)
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
