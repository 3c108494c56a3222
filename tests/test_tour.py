"""The notebook examples/tour.ipynb: its cells run in order, and show what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

TOUR = Path(__file__).parents[1] / "examples/tour.ipynb"
CELLS = json.loads(TOUR.read_text("utf-8"))["cells"]


@pytest.fixture(scope="module")
def after() -> dict[str, Any]:
    """What the cells leave behind, run in one namespace, as a kernel does."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")  # no window
    names: dict[str, Any] = {"__name__": "__main__"}
    for k, cell in enumerate(CELLS):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{TOUR.name}, cell {k}", "exec"), names)
    return names


def test_it_is_a_notebook_without_outputs():
    assert {cell["cell_type"] for cell in CELLS} == {"markdown", "code"}
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
    assert not [cell for cell in CELLS if cell.get("outputs") or cell.get("execution_count")]


def test_its_links_lead_somewhere():
    links = re.findall(r"\]\((\.\./[^)#]+)\)", "".join("".join(cell["source"]) for cell in CELLS))
    assert len(links) >= 3
    assert [link for link in links if not (TOUR.parent / link).exists()] == []


def test_the_swapped_import_trains_the_same(after):
    assert after["our_losses"] == pytest.approx(after["their_losses"], abs=1e-3)
    assert after["our_losses"][-1] < after["our_losses"][0] / 3


def test_clipping_averages_projections_and_bytes_are_shown(after):
    assert after["clipped_losses"] != after["our_losses"]
    assert after["averaged_accuracy"] > 0.9
    assert after["averaged_accuracy"] != after["trained_accuracy"]
    assert after["projections"]["0.weight"] == "channel"
    assert after["projections"]["3.weight"] == "none"
    assert "slice8" in after["summary"]


def test_the_plot_has_three_curves(after):
    assert len(after["axes"].get_lines()) == 3
