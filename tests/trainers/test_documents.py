"""Every code block of docs/using-it-with.md is complete and runs on its own."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch

DOCUMENT = Path(__file__).parents[2] / "docs/using-it-with.md"
SECTION = re.compile(r"^## (?P<name>.+?)\n.*?```python\n(?P<code>.*?)```", re.DOTALL | re.MULTILINE)
SECTIONS = {m["name"]: m["code"] for m in SECTION.finditer(DOCUMENT.read_text(encoding="utf-8"))}
PACKAGES = ("pytorch_lightning", "transformers", "accelerate", "safetensors")


def test_every_section_has_a_block_and_a_link():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert list(SECTIONS) == re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert text.count("```python") == len(SECTIONS)
    anchors = [re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in SECTIONS]
    assert sorted(re.findall(r"\(#(.+?)\)", text)) == sorted(anchors)


@pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning", "ignore::FutureWarning:pytorch_lightning")
@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")  # of a DataLoader, without a GPU
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.gpu] if c.startswith("# needs a GPU\n") else []) for n, c in SECTIONS.items()],
)
def test_the_code_runs(name, tmp_path, monkeypatch):
    code = SECTIONS[name]
    for package in PACKAGES:
        if re.search(rf"^(import|from) {package}\b", code, re.MULTILINE):
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # the step is the same, and the rest need not be compiled by a C++ compiler
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch.manual_seed(0)
    exec(compile(code, f"{DOCUMENT.name}: {name}", "exec"), {"__name__": "__main__"})
