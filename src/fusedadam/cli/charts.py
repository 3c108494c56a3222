"""What all charts share: matplotlib draws them, without a screen, as PNG or as SVG for a page."""

from __future__ import annotations

import copy
import importlib.util
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSING = "No picture: matplotlib is not installed (pip install matplotlib)."
OURS, PEER, FAILED, INK, GRID, PAPER = "#2563eb", "#a3b1c6", "#b42318", "#1f2937", "#dfe3e8", "#ffffff"
SERIES = ("#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2", "#65a30d", "#be185d", "#475569")
DASHED = (0, (4, 3))


def possible() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def empty(width: float, height: float, title: str = "") -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
    if title:
        figure.suptitle(title, fontsize=13, color=INK)
    return figure


def titled(axes: Axes, title: str) -> None:
    if title:
        axes.set_title(title, fontsize=10, loc="left", color=INK, wrap=True)
    axes.set_facecolor(PAPER)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(which="both", color=INK, labelcolor=INK)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)


def label(axes: Axes, x: float, y: float, text: str, color: str = INK) -> None:
    """At the end of a bar, readable on top of grid lines."""
    behind = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.6}
    axes.text(x, y, text, va="center", fontsize=8.5, color=color, bbox=behind)


def png(figure: Figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, dpi=120, format="png")
    return content.getvalue()


def svg(figure: Figure, title: str, colors: Mapping[str, str]) -> str:
    """An ``<svg>`` element for a page. ``colors``: what to write for a color, such as a variable of the page's CSS.

    It has no ids and refers to nothing, so that several fit into one page.
    """
    import matplotlib

    content = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fusedadam"}):
        figure.savefig(content, format="svg")
    root = ElementTree.fromstring(content.getvalue())
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
    known = {element.get("id"): element for element in root.iter()}
    for parent in list(root.iter()):
        for index, child in reversed(list(enumerate(parent))):
            if child.tag in ("defs", "metadata"):
                parent.remove(child)
            elif child.tag == "use":
                moved = {"transform": f"translate({child.get('x')} {child.get('y')})", "style": child.get("style", "")}
                parent[index] = ElementTree.Element("g", moved)
                parent[index].append(copy.deepcopy(known[child.get("href", "")[1:]]))
    for element in root.iter():
        element.attrib = {name: v for name, v in element.attrib.items() if name not in ("id", "clip-path")}
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": title}
    text = ElementTree.tostring(root, encoding="unicode")
    for color, written in colors.items():
        text = text.replace(color, written)
    return text
