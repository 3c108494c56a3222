"""Charts as SVG for a page."""

from xml.etree import ElementTree

import pytest

from fusedadam.cli import charts

pytest.importorskip("matplotlib")


def test_a_chart_for_a_page_refers_to_nothing_and_has_the_colors_of_the_page():
    figure = charts.empty(3, 2)
    axes = figure.subplots()
    axes.plot([1, 2, 3], [4, 5, 6], marker="o", color=charts.OURS)
    charts.titled(axes, "two < three")
    text = charts.svg(figure, 'a "title"', {charts.OURS: "var(--ours)"})
    root = ElementTree.fromstring(text)
    assert root.tag == "svg"
    assert root.get("aria-label") == 'a "title"'
    assert not {"use", "defs", "metadata"} & {element.tag for element in root.iter()}
    assert not any({"id", "href", "clip-path"} & set(element.attrib) for element in root.iter())
    assert text.count("var(--ours)") > 3, "a line and its markers"
    assert charts.OURS not in text
    assert "two < three" in root.itertext()
