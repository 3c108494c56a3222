"""Reads the README's figures from docs/performance.md and draws their picture: `python tools/figures.py`.

Every number comes from the first table of that page, which has the output of benchmarks/speed.py.
"""

from __future__ import annotations

import io
import re
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
NAMES = ("card", "text", "quiet", "peer", "ours", "on")
LIGHT = dict(zip(NAMES, ("#f6f8fa", "#1f2328", "#59636e", "#d1d9e0", "#3f51b5", "#fffffe"), strict=True))
DARK = dict(zip(NAMES, ("#1b1f27", "#e6e8ec", "#9aa4b2", "#3b4350", "#8c9eff", "#10131a"), strict=True))


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
    for x, color, words in ((MARGIN, "ours", "fusedadam"), (MARGIN + 110, "peer", "baseline: the full bar")):
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
    return _with_style(_svg(figure), f'width="{WIDTH}" height="{height}" role="img" aria-label="{told}"')


def _svg(figure: Figure) -> str:
    import matplotlib

    content = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fusedadam"}):
        figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})
    return content.getvalue().replace(" \n", "\n")


def _with_style(svg: str, attributes: str) -> str:
    """Colors are variables of CSS, which has them for light and dark pages."""
    for name, color in LIGHT.items():
        svg = svg.replace(color, f"var(--{name})")
    svg = re.sub(r'width="[^"]*pt" height="[^"]*pt"', attributes, svg, count=1)
    return re.sub(r"(<svg [^>]*>)", rf"\1\n{style()}", svg, count=1)


def style() -> str:
    light, dark = (" ".join(f"--{name}: {color};" for name, color in colors.items()) for colors in (LIGHT, DARK))
    fonts = 'system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif'
    dark = f"@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}"
    return f"<style>\nsvg {{ {light} }}\n{dark}\ntext {{ font-family: {fonts} !important; }}\n</style>"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)} written")
