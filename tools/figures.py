"""Reads the README's figures from docs/performance.md and draws their picture: `python tools/figures.py`.

Every number comes from the first table of that page, which has the output of benchmarks/speed.py.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Mapping
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from fusedadam.cli import charts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
PAGE, PICTURE = ROOT / "docs/performance.md", ROOT / "docs/pictures/speed.svg"

# Rows of that table, and their titles for readers who do not know our sets of parameters
ON_H200 = {
    "AdamW fp32, llama: 940.6M in 37 tensors": "AdamW, 941M parameters",
    "AdamW bf16, llama": "AdamW in bfloat16, 941M",
    "AdamW fp32, `max_grad_norm=1`, llama": "AdamW + clipping, 941M",
    "EmaAdamW fp32, llama": "AdamW + EMA, 941M",
    "SGD fp32 with momentum, llama": "SGD with momentum, 941M",
    "Adan fp32, llama": "Adan, 941M",
    "AdamP fp32, llama": "AdamP, 941M parameters",
    "AdamP fp32, gpt": "AdamP, 124M parameters",
    "BertAdam fp32, gpt": "BertAdam, 124M parameters",
}

WIDTH, MARGIN, BAR, ROW, TOP = 600, 20, 22, 58, 72  # pixels
LIGHT = {
    "card": "#f6f8fa",
    "text": "#1f2328",
    "quiet": "#59636e",
    "peer": "#d1d9e0",
    "ours": "#3f51b5",
    "on": "#fffffe",
}
DARK = {"card": "#1b1f27", "text": "#e6e8ec", "quiet": "#9aa4b2", "peer": "#3b4350", "ours": "#8c9eff", "on": "#10131a"}


def figures() -> dict[str, tuple[str, str, str, str, str]]:
    """For each row by name: our ms, percent of copy bandwidth (may be empty), the peer, its ms, the ratio."""
    table = PAGE.read_text(encoding="utf-8").partition("## NVIDIA H200")[2].partition("\n\n")[0]
    rows = {}
    for line in table.splitlines()[1:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and re.match(r"[\d.]+$", cells[1]):
            what, ours, of_copy, peer, theirs, ratio = cells
            peer = peer.removeprefix("the ").replace("`adamp` package", "`adamp`").replace("`adamp`", "`adamp` package")
            rows[what] = (ours, of_copy.removesuffix(" %"), peer, theirs, ratio.partition(" ")[0])
    missing = [what for what in ON_H200 if what not in rows]
    if missing:
        raise ValueError(f"{PAGE} has no row {missing[0]!r}; ON_H200 must name rows of its first table")
    return rows


def in_words(number: str) -> str:
    """With three significant digits, rounding half up."""
    value = Decimal(number)
    return str(value.quantize(Decimal(1).scaleb(value.adjusted() - 2), ROUND_HALF_UP))


def picture() -> str:
    """Our time as a fraction of the peer's, whose bar always has the full width."""
    known, height = figures(), TOP + len(ON_H200) * ROW + 12
    figure = charts.empty(WIDTH / 72, height / 72)
    figure.set(layout_engine="none", facecolor=LIGHT["card"])
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    axes.axis("off")

    def text(x: float, y: float, words: str, color: str = "text", **how: Any) -> None:
        axes.text(x, y, words, color=LIGHT[color], **{"fontsize": 15, **how})

    def bar(x: float, y: float, length: float, thickness: float, color: str) -> None:
        axes.barh(y, length, thickness, x, align="edge", color=LIGHT[color])

    text(MARGIN, 32, "One optimizer.step() on an NVIDIA H200", fontsize=18, weight="bold")
    for x, color, words in (
        (MARGIN, "ours", "fusedadam"),
        (MARGIN + 110, "peer", "baseline: the full bar"),
    ):
        bar(x, 45, 12, 12, color)
        text(x + 18, 56, words, "quiet")
    length, right = WIDTH - 2 * MARGIN, WIDTH - MARGIN
    for k, (what, title) in enumerate(ON_H200.items()):
        ours, _, peer, theirs, ratio = known[what]
        y, part = TOP + k * ROW, round(length * float(ours) / float(theirs))
        text(MARGIN, y + 20, title)
        text(right - 60, y + 20, f"vs. {peer.replace('`', '')}", "quiet", ha="right", fontsize=14)
        text(right, y + 20, f"{ratio} \u00d7", ha="right", weight="bold")
        bar(MARGIN, y + 28, length, BAR, "peer")
        bar(MARGIN, y + 28, part, BAR, "ours")
        if part < 80:  # too short to write on
            text(MARGIN + part + 8, y + 44, f"{in_words(ours)} ms", weight="bold")
        else:
            text(MARGIN + part - 8, y + 44, f"{in_words(ours)} ms", "on", ha="right", weight="bold")
        text(right - 8, y + 44, f"{in_words(theirs)} ms", ha="right")
    told = "; ".join(f"{title}: {known[what][4]} times as fast as {known[what][2]}" for what, title in ON_H200.items())
    drawn = svg(figure, told, {color: f"var(--{name})" for name, color in LIGHT.items()})
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
    return drawn.replace("<svg ", begin, 1).replace(">", f">\n{style()}", 1) + "\n"


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


def style() -> str:
    light, dark = (" ".join(f"--{name}: {color};" for name, color in colors.items()) for colors in (LIGHT, DARK))
    fonts = 'system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif'
    dark = f"@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}"
    return f"<style>\nsvg {{ {light} }}\n{dark}\ntext {{ font-family: {fonts} !important; }}\n</style>"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)} written")
