"""A steady step on a CPU passes the files that docs/architecture.md says, and no others."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

import fusedadam

PACKAGE = Path(fusedadam.__file__).parent
PAGE = Path(__file__).parents[2] / "docs/architecture.md"
ROOMS = ("contract", "engine", "backends")  # what the rule computes is its own, and tensors/ has no part of the path


def passed() -> list[str]:
    """The files that the fourth step calls functions of, in the order of their first calls."""
    model = torch.nn.Linear(768, 3072)
    optimizer = fusedadam.AdamW(model.parameters())
    seen: dict[str, None] = {}

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            seen[path.relative_to(PACKAGE).as_posix()] = None

    for step in range(4):
        for param in model.parameters():
            param.grad = torch.full_like(param, step)
        if step == 3:
            sys.setprofile(note)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
    return [path for path in seen if path.startswith(ROOMS)]


def documented() -> set[str]:
    table = PAGE.read_text(encoding="utf-8").partition("\n## One step, from folder to folder\n")[2].partition("```")[0]
    stops = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {path for stop in stops for path in re.findall(r"`([^`]+)`", stop)}


def test_the_page_names_every_file_that_a_step_passes():
    found = {"backends/numba/" if path.startswith("backends/numba/") else path for path in passed()}
    assert found == documented()


def test_a_step_passes_few_files():
    assert len(passed()) <= 12
