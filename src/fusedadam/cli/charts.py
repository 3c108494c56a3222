"""What all charts share: matplotlib draws them as PNG, without a screen."""

from __future__ import annotations

import importlib.util
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSTALL = 'pip install "fusedadam[bench]", or from a clone pip install ".[bench]"'
MISSING = f"No picture: matplotlib is not installed. Run {INSTALL}"
OURS, PEER, FAILED, INK, PAPER = "#2563eb", "#a3b1c6", "#b42318", "#1f2937", "#ffffff"
SERIES = ("#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2", "#65a30d", "#be185d", "#475569")
DASHED = (0, (4, 3))


def possible() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def empty(width: float, height: float, title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
    figure.suptitle(title, fontsize=13, color=INK)
    return figure


def titled(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left", color=INK, wrap=True)
    axes.spines[["top", "right"]].set_visible(False)


def label(axes: Axes, x: float, y: float, text: str, color: str = INK) -> None:
    """At the end of a bar, readable on top of grid lines."""
    behind = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.6}
    axes.text(x, y, text, va="center", fontsize=8.5, color=color, bbox=behind)


def png(figure: Figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, dpi=120, format="png")
    return content.getvalue()
