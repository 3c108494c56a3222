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
    "AdamW fp32, `max_grad_norm=1`, llama": "AdamW + clipping, 941M",
    "EMA-AdamW fp32, llama": "AdamW + EMA, 941M",
    "AdamW fp32, 1,000 tensors of 64 to 65,536": "AdamW, 1,000 small tensors",
    "AdamP fp32, llama": "AdamP, 941M parameters",
    "AdamP fp32, gpt": "AdamP, 124M parameters",
    "BertAdam fp32, gpt": "BertAdam, 124M parameters",
}

WIDTH, MARGIN, BAR, ROW, TOP = 600, 20, 22, 58, 72
STYLE = """
  .card { fill: #f6f8fa; } .text { fill: #1f2328; } .quiet { fill: #59636e; } .peer { fill: #d1d9e0; }
  .ours { fill: #3f51b5; } .on-ours { fill: #ffffff; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #1b1f27; } .text { fill: #e6e8ec; } .quiet { fill: #9aa4b2; } .peer { fill: #3b4350; }
    .ours { fill: #8c9eff; } .on-ours { fill: #10131a; }
  }
  text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; font-size: 15px; }
  .bold, .title { font-weight: 600; } .title { font-size: 18px; } tspan { font-size: 14px; }
"""


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
    known = figures()
    length, right = WIDTH - 2 * MARGIN, WIDTH - MARGIN - 8
    lines = [
        f'<text x="{MARGIN}" y="32" class="text title">One optimizer.step() on an NVIDIA H200</text>',
        f'<rect x="{MARGIN}" y="45" width="12" height="12" rx="2" class="ours"/>',
        f'<text x="{MARGIN + 18}" y="56" class="quiet">fusedadam</text>',
        f'<rect x="{MARGIN + 110}" y="45" width="12" height="12" rx="2" class="peer"/>',
        f'<text x="{MARGIN + 128}" y="56" class="quiet">the peer: its time is the whole bar</text>',
    ]
    for k, (what, title) in enumerate(ON_H200.items()):
        ours, _, peer, theirs, ratio = known[what]
        y, part = TOP + k * ROW, round(length * float(ours) / float(theirs))
        beside = part < 80  # the bar is too short for its label
        at, anchor, kind = (MARGIN + part + 8, "start", "text") if beside else (MARGIN + part - 8, "end", "on-ours")
        lines += [
            f'<text x="{MARGIN}" y="{y + 20}" class="text">{escape(title)} '
            f'<tspan class="quiet">against {escape(peer.replace("`", ""))}</tspan></text>',
            f'<text x="{WIDTH - MARGIN}" y="{y + 20}" text-anchor="end" class="text bold">{ratio} \u00d7</text>',
            f'<rect x="{MARGIN}" y="{y + 28}" width="{length}" height="{BAR}" rx="3" class="peer"/>',
            f'<rect x="{MARGIN}" y="{y + 28}" width="{part}" height="{BAR}" rx="3" class="ours"/>',
            f'<text x="{at}" y="{y + 44}" text-anchor="{anchor}" class="{kind} bold">{in_words(ours)} ms</text>',
            f'<text x="{right}" y="{y + 44}" text-anchor="end" class="text">{in_words(theirs)} ms</text>',
        ]
    height = TOP + len(ON_H200) * ROW + 12
    told = "; ".join(f"{title}: {known[what][4]} times as fast as {known[what][2]}" for what, title in ON_H200.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img">\n<title>One step of each optimizer against its peer, on an H200</title>\n'
        f"<desc>{escape(told)}</desc>\n<style>{STYLE}</style>\n"
        f'<rect width="{WIDTH}" height="{height}" rx="10" class="card"/>\n' + "\n".join(lines) + "\n</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)} written")
