"""The documentation: it builds without a warning, fetches nothing from elsewhere, and says what the code does."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusedadam
from fusedadam.catalog import CATALOG

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))  # its scripts import each other by name

import api
import figures
import reference

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/fusedadam"
FETCHED = re.compile(r"<(?:script|link|img|iframe|source)[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
# What readers search for, and a page that must come up
SEARCHED = {"deterministic": "numerics.html", "DDP": "scale.html", "API": "api/index.html", "sharded": "scale.html"}
SEARCHED |= {"requirements": "start.html", "sync": "optimizers/clipping.html", "grad_norm": "api/optimizers.html"}
SEARCHED |= {"muon": "ascend.html", "wandb": "using-it-with.html", "tensorboard": "using-it-with.html"}
SEARCHED |= {"safetensors": "using-it-with.html", "bitsandbytes": "migration.html"}
OPTIMIZERS = [*CATALOG]
# one number for the parameter, beside two moments
(WITH_A_NUMBER,) = (entry.name for entry in CATALOG.values() if entry.float32_twin)


def test_the_site_builds_and_is_complete_in_itself(tmp_path):
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text("utf-8") for path in tmp_path.rglob("*.html")}
    assert len(pages) > 15
    for name, text in pages.items():
        # a reader's browser goes elsewhere if they follow a link, and for nothing else
        assert not FETCHED.findall(text), name
        assert "arithmatex" not in text, f"{name}: a formula that was not drawn"
        # what a code host takes for a list or a table, and this Markdown for a paragraph that goes on
        assert not re.findall(r"<p>[^<]*\n(?:- |\d+\. |\|)", text), name
    for style in tmp_path.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import\s+)[\"']?(?:https?:)?//", style.read_text("utf-8")), style.name
    for entry in CATALOG.values():
        assert "<math" in pages[f"optimizers/{entry.page}.html"]
        assert f'href="optimizers/{entry.page}.html"' in pages["index.html"], "the navigation"
    # search works from disk too: its index is a script, and what stands in for a worker comes with the site
    assert (tmp_path / "search/search_index.js").exists()
    assert 'src="assets/iframe-worker.js"' in pages["index.html"]
    index = json.loads((tmp_path / "search/search_index.json").read_text("utf-8"))

    def words(text: str) -> set[str]:
        return {*re.split(index["config"]["separator"], re.sub(r"<[^>]+>", " ", text).lower())}

    for word, page in SEARCHED.items():
        entries = [entry for entry in index["docs"] if entry["location"].partition("#")[0] == page]
        assert any(words(word) <= words(entry["title"] + " " + entry["text"]) for entry in entries), word
    assert "class Transformer" in re.sub(r"<[^>]+>", "", pages["examples.html"])


def test_parts_that_follow_from_the_code_are_up_to_date():
    stale = [
        path.relative_to(ROOT) for path in reference.documents() if reference.filled(path) != path.read_text("utf-8")
    ]
    assert not stale, "run `python tools/reference.py`"


def test_the_picture_shows_the_figures_of_the_page():
    assert figures.PICTURE.read_text("utf-8") == figures.picture(), "run `python tools/figures.py`"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_a_page_with_all_of_its_arguments(name):
    page = ROOT / f"docs/optimizers/{CATALOG[name].page}.md"
    table = page.read_text("utf-8").partition("## Arguments")[2].partition("## Cost")[0]
    expected = [n for n in inspect.signature(getattr(fusedadam, name)).parameters if n != "self"]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == expected
    assert all(
        f"reference.py: {part} {name} -->" in page.read_text("utf-8") for part in ("formula", "arguments", "cost")
    )


def test_every_public_name_is_in_the_api_reference():
    text = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "docs/api").glob("*.md")))
    headings = set(re.findall(r"^##+ (\S+)$", text, re.MULTILINE))
    expected = {*fusedadam.__all__} - {"ops", "checks"}  # modules, whose functions follow
    for module in (fusedadam.functional, fusedadam.ops, fusedadam.schedules):
        expected |= {f"{module.__name__.rpartition('.')[2]}.{name}" for name in module.__all__}
    for name in ("FusedOptimizer", *OPTIMIZERS):
        members = {m: value for m, value in vars(getattr(fusedadam, name)).items() if not m.startswith("_")}
        used = {m for m, value in members.items() if callable(value) or isinstance(value, (property, classmethod))}
        expected |= used - {*api.UNLISTED}
    assert not expected - headings, "run `python tools/reference.py`; does the name have a docstring?"
    rules = (ROOT / "docs/rules.md").read_text("utf-8")
    assert all(f"`{check}`" in rules for check in api.CHECKS)


# Counted by hand: p, g, m, v are read and p, m, v written, then whatever comes on top.
@pytest.mark.parametrize(
    ("name", "options", "shape", "dtypes", "moved", "kept"),
    [
        ("AdamW", {}, (8,), (torch.float32, None), 7 * 4, 2 * 4),
        ("AdamW", {}, (8,), (torch.bfloat16, None), 7 * 2, 2 * 2),
        ("AdamW", {}, (8,), (torch.bfloat16, torch.float32), 3 * 2 + 4 * 4, 2 * 4),
        ("AdamW", {"max_grad_norm": 1.0}, (8,), (torch.float32, None), 8 * 4, 2 * 4),
        ("Adam", {"amsgrad": True}, (8,), (torch.float32, None), 9 * 4, 3 * 4),
        ("EmaAdamW", {}, (8,), (torch.float32, None), 9 * 4, 3 * 4),
        ("BertAdam", {}, (8,), (torch.float32, None), 8 * 4, 2 * 4),
        ("AdamP", {}, (8, 8), (torch.float32, None), (6 + 4) * 4, 2 * 4),
        ("AdamP", {}, (8,), (torch.float32, None), 7 * 4, 2 * 4),
        ("SGD", {}, (8,), (torch.float32, None), 3 * 4, 0),
        ("SGD", {"momentum": 0.9}, (8,), (torch.float32, None), 5 * 4, 4),
        ("RMSprop", {}, (8,), (torch.float32, None), 5 * 4, 4),
        ("RMSpropTF", {"momentum": 0.9, "centered": True}, (8,), (torch.float32, None), 9 * 4, 3 * 4),
        ("Adadelta", {}, (8,), (torch.float32, None), 7 * 4, 2 * 4),
        ("Lamb", {"adam": True}, (8,), (torch.float32, None), 7 * 4, 2 * 4),
        ("RAdam", {}, (8,), (torch.float32, None), 7 * 4, 2 * 4),
        (WITH_A_NUMBER, {}, (8,), (torch.float32, None), (7 + 2 / 8) * 4, (2 + 1 / 8) * 4),
        (WITH_A_NUMBER, {}, (8,), (torch.bfloat16, None), 7 * 2 + 2 / 8 * 4, 2 * 2 + 4 / 8),
        # g for the columns, g for the rows, p and g for their sizes, p and g read and p written; and the states
        ("Adafactor", {}, (8, 4), (torch.float32, None), (7 + 2 * (8 + 4) / 32) * 4, (8 + 4) / 32 * 4),
        ("Adafactor", {}, (8,), (torch.float32, None), (4 + 4) * 4, 4),
        ("Adan", {}, (8,), (torch.float32, None), 11 * 4, 4 * 4),
        ("AdEMAMix", {}, (8,), (torch.float32, None), 9 * 4, 3 * 4),
        ("Lion", {}, (8,), (torch.float32, None), 5 * 4, 4),
        ("ScheduleFreeAdamW", {}, (8,), (torch.float32, None), 7 * 4, 2 * 4),
        ("Lamb", {}, (8,), (torch.float32, None), (6 + 4) * 4, 2 * 4),
    ],
)
def test_what_a_step_moves_and_keeps(name, options, shape, dtypes, moved, kept):
    assert reference.bytes_a_parameter(name, options, shape, *dtypes) == (moved, kept)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_kept_is_what_a_state_has(name):
    for _, options, shape in reference.variants(name):
        for dtype, state_dtype in reference.MIXES:
            param = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
            optimizer = getattr(fusedadam, name)([param], state_dtype=state_dtype, backend="eager", **options)
            param.grad = torch.ones_like(param)
            optimizer.step()
            states = [value for key, value in optimizer.state[param].items() if key != "step"]
            kept = sum(state.numel() * state.element_size() for state in states)
            assert kept == param.numel() * reference.bytes_a_parameter(name, options, shape, dtype, state_dtype)[1]


def test_a_docstring_that_forgets_an_argument_is_noticed(monkeypatch):
    forgotten = fusedadam.AdamW.__doc__.replace("        amsgrad: divide by the largest second moment so far\n", "")
    monkeypatch.setattr(fusedadam.AdamW, "__doc__", forgotten)
    with pytest.raises(ValueError, match="its docstring describes"):
        reference.arguments("AdamW")


def test_every_room_is_in_the_architecture_and_every_file_that_it_names_exists():
    said = (ROOT / "docs/architecture.md").read_text("utf-8").partition("## Rooms")[2]
    files = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py", "__main__.py"}
    folders = {f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert set(re.findall(r"`([a-z_]+(?:\.py|/))`", said)) == files | folders
    for path in re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", said):
        assert (PACKAGE / path).exists(), path


def test_tables_have_headings():
    for path in reference.documents():
        for row in re.findall(r"^\|(.*)\|\n\|[-|]+\|$", path.read_text("utf-8"), re.MULTILINE):
            assert all(cell.strip() for cell in row.split("|")), f"{path.relative_to(ROOT)}: |{row}|"


def slug(heading: str) -> str:
    """The anchor that code hosts and the site both give to a heading."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", words))


def test_links_lead_somewhere_on_a_code_host():
    for path in reference.documents():
        text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        for target, anchor in re.findall(r"\]\(([^()#\s:]*)(?:#([^()\s]*))?\)", text):
            there = (path.parent / target).resolve() if target else path
            assert there.exists(), f"{path.relative_to(ROOT)} links to {target}"
            if anchor:
                headings = re.findall(r"^#+ (.+)$", there.read_text("utf-8"), re.MULTILINE)
                assert anchor in map(slug, headings), f"{path.relative_to(ROOT)} links to {target}#{anchor}"
