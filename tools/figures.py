"""Reads the README's figures from docs/performance.md and draws their picture: `python tools/figures.py`.

Every number comes from the first table of that page, which has the output of benchmarks/speed.py.
"""

from __future__ import annotations

import re
from decimal import ROUND_HALF_UP, Decimal
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, PICTURE = ROOT / "docs/performance.md", ROOT / "docs/pictures/speed.svg"

# Rows of that table, and their titles for readers who do not know our sets of parameters
ON_H200 = {
    "AdamW fp32, llama: 940.6M in 37 tensors": "AdamW, 941M parameters",
    "AdamW bf16, llama": "AdamW in bfloat16, 941M",
    'AdamW bf16, `storage="8bit"`, llama': "AdamW in 8 bits, 941M",
    "AdamW fp32, `max_grad_norm=1`, llama": "AdamW + clipping, 941M",
    "EmaAdamW fp32, llama": "AdamW + EMA, 941M",
    "SGD fp32 with momentum, llama": "SGD with momentum, 941M",
    "Adan fp32, llama": "Adan, 941M",
    "AdamP fp32, llama": "AdamP, 941M parameters",
    "AdamP fp32, gpt": "AdamP, 124M parameters",
    "BertAdam fp32, gpt": "BertAdam, 124M parameters",
    "Muon fp32, llama's 28 matrices": "Muon, a llama's 28 matrices",
    "Muon fp32, gpt's 48 matrices": "Muon, GPT-2's 48 matrices",
}

WIDTH, MARGIN, BAR, ROW, TOP = 600, 20, 22, 58, 72  # pixels
COLORS = {  # on a light page, and on a dark one
    "card": ("#f6f8fa", "#1b1f27"), "text": ("#1f2328", "#e6e8ec"), "quiet": ("#59636e", "#9aa4b2"),
    "peer": ("#d1d9e0", "#3b4350"), "ours": ("#3f51b5", "#8c9eff"), "on": ("#fffffe", "#10131a"),
}  # fmt: skip
FONTS = 'system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif'


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
    known, height, drawn = figures(), TOP + len(ON_H200) * ROW + 12, [style()]

    def text(x: float, y: float, words: str, kind: str = "text", size: int = 15) -> None:
        drawn.append(f'<text x="{x}" y="{y}" font-size="{size}" class="{kind}">{escape(words)}</text>')

    def bar(x: float, y: float, length: float, thickness: float, kind: str) -> None:
        drawn.append(f'<rect x="{x}" y="{y}" width="{length}" height="{thickness}" class="{kind}"/>')

    bar(0, 0, WIDTH, height, "card")
    text(MARGIN, 32, "One optimizer.step() on an NVIDIA H200", "text bold", 18)
    for x, kind, words in ((MARGIN, "ours", "fusedadam"), (MARGIN + 110, "peer", "baseline: the full bar")):
        bar(x, 45, 12, 12, kind)
        text(x + 18, 56, words, "quiet")
    length, right = WIDTH - 2 * MARGIN, WIDTH - MARGIN
    for k, (what, title) in enumerate(ON_H200.items()):
        ours, _, peer, theirs, ratio = known[what]
        y, part = TOP + k * ROW, round(length * float(ours) / float(theirs))
        text(MARGIN, y + 20, title)
        text(right - 60, y + 20, f"vs. {peer.replace('`', '')}", "quiet right", 14)
        text(right, y + 20, f"{ratio} \u00d7", "text bold right")
        bar(MARGIN, y + 28, length, BAR, "peer")
        bar(MARGIN, y + 28, part, BAR, "ours")
        if part < 80:  # too short to write on
            text(MARGIN + part + 8, y + 44, f"{in_words(ours)} ms", "text bold")
        else:
            text(MARGIN + part - 8, y + 44, f"{in_words(ours)} ms", "on bold right")
        text(right - 8, y + 44, f"{in_words(theirs)} ms", "text right")
    told = "; ".join(f"{title}: {known[what][4]} times as fast as {known[what][2]}" for what, title in ON_H200.items())
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(told)}">'
    return "\n".join([begin, *drawn, "</svg>\n"])


def style() -> str:
    light, dark = (" ".join(f".{kind} {{ fill: {own[k]}; }}" for kind, own in COLORS.items()) for k in (0, 1))
    shapes = f"text {{ font-family: {FONTS}; }} .bold {{ font-weight: bold; }} .right {{ text-anchor: end; }}"
    return f"<style>\n{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n{shapes}\n</style>"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)} written")
