"""The HTML page."""

from __future__ import annotations

from typing import Any

import pytest

from fusedadam.cli.bench.page import page, png
from fusedadam.cli.bench.report import Result, Set, Spread
from tests.cli.bench.test_report import report


def test_names_cannot_break_the_page() -> None:
    made = report(Result("AdamW", "fusedadam", "gpt", "float32", ms=Spread(1.0, 1.0, 1.0)))
    made.results.append(Result("AdamW", "<script>alert(1)</script>", "gpt", "float32", failed="1 < 2 & 'so'"))
    made.sets.append(Set("<script>.pt", 1, 100))
    made.results.append(Result("AdamW", "fusedadam", "<script>.pt", "float32", failed="so"))
    text = page(made, b"a picture")
    assert "<script" not in text
    assert "1 &lt; 2 &amp;" in text


def test_without_matplotlib_the_page_says_what_to_install() -> None:
    text = page(report(Result("AdamW", "fusedadam", "gpt", "float32", ms=Spread(1.0, 1.0, 1.0))), None)
    assert 'pip install "fusedadam[bench]", or from a clone pip install ".[bench]"' in text
    assert "<img" not in text


def test_bytes_are_drawn_against_time_for_optimizers_measured_with_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    ms, drawn = Spread(1.0, 1.0, 1.0), []
    draw = page.__globals__["_bytes_against_time"]

    def spy(axes: Any, rows: list[Result], title: str) -> None:
        draw(axes, rows, title)
        drawn.append([text.get_text() for text in axes.texts])

    monkeypatch.setitem(page.__globals__, "_bytes_against_time", spy)
    made = report(
        Result("AdamW", "fusedadam", "gpt", "float32", ms=ms, bytes_a_parameter=12.0),
        Result("AdamW", "fusedadam-8bit", "gpt", "float32", ms=ms, bytes_a_parameter=6.06),
        Result("AdamW", "torch-fused", "gpt", "float32", ms=ms, bytes_a_parameter=12.0),
        Result("AdamW", "optimi", "gpt", "float32", failed="so"),
        Result("Adam", "fusedadam", "gpt", "float32", ms=ms, bytes_a_parameter=12.0),
        Result("AdamP", "fusedadam-8bit", "gpt", "float32", failed="so"),
    )
    assert png(made).startswith(b"\x89PNG")
    assert drawn == [["AdamW", "AdamW 8bit", "torch-fused"]]
