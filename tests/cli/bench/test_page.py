"""The HTML page."""

from __future__ import annotations

from fusedadam.cli import charts
from fusedadam.cli.bench.page import page
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
    assert charts.MISSING in text
    assert "<img" not in text
