"""Draw a simulated day as bars in SVG, one pair for each figure."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 900
TOP: Final = 92
ROW: Final = 52
BAR: Final = 16
LEFT: Final = 300
LONGEST: Final = 470
"""Length of the longest bar of a pair, whiskers included."""

STYLE: Final = """
  .back { fill: #ffffff; stroke: #d0d7de } .text { fill: #1f2328 } .soft { fill: #57606a }
  .stock { fill: #8c959f } .ours { fill: #1f9d61 } .spread { stroke: #1f2328 }
  @media (prefers-color-scheme: dark) {
    .back { fill: #0d1117; stroke: #30363d } .text { fill: #e6edf3 } .soft { fill: #9198a1 }
    .stock { fill: #6e7681 } .ours { fill: #2ea66b } .spread { stroke: #e6edf3 }
  }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Values of one figure without and with idlegpu.

    Attributes:
        label: name of the figure.
        unit: unit of the figure.
        stock: values of the seeds with kube-scheduler alone.
        ours: values of the seeds with idlegpu.
    """

    label: str
    unit: str
    stock: Sequence[float]
    ours: Sequence[float]


def shown(value: float) -> str:
    """Format a value with few digits: whole from 100 on, otherwise with one or two decimals."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def draw(title: str, about: str, pairs: Sequence[Pair]) -> str:
    """Return the SVG document: bars for means, thin lines from the lowest to the highest seed.

    Args:
        title: heading.
        about: one line below it.
        pairs: the figures; each pair has a scale of its own.
    """
    height = TOP + ROW * len(pairs) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="14" role="img" '
        f'aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="back" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="text" x="20" y="32" font-size="17" font-weight="bold">{escape(title)}'
        "</text>",
        f'<text class="soft" x="20" y="54" font-size="13">{escape(about)}</text>',
        *_legend(LEFT, "stock", "kube-scheduler alone"),
        *_legend(LEFT + 190, "ours", "with idlegpu"),
    ]
    for number, pair in enumerate(pairs):
        parts += _bars(TOP + ROW * number, pair)
    return "\n".join([*parts, "</svg>", ""])


def _legend(x: int, kind: str, text: str) -> list[str]:
    return [
        f'<rect class="{kind}" x="{x}" y="68" width="12" height="12" rx="2"/>',
        f'<text class="text" x="{x + 18}" y="79" font-size="13">{text}</text>',
    ]


def _bars(y: int, pair: Pair) -> list[str]:
    most = max(*pair.stock, *pair.ours) or 1.0
    middle = y + BAR + 10
    parts = [
        f'<text class="text" x="{LEFT - 14}" y="{middle - 2}" text-anchor="end">'
        f"{escape(pair.label)}</text>",
        f'<text class="soft" x="{LEFT - 14}" y="{middle + 15}" text-anchor="end" font-size="12">'
        f"{escape(pair.unit)}</text>",
    ]
    for place, (kind, values) in enumerate((("stock", pair.stock), ("ours", pair.ours))):
        top, mean = y + 6 + place * (BAR + 3), sum(values) / len(values)
        length = LONGEST * mean / most
        least, end = (LEFT + LONGEST * value / most for value in (min(values), max(values)))
        parts += [
            f'<rect class="{kind}" x="{LEFT}" y="{top}" width="{max(length, 1):.1f}" '
            f'height="{BAR}" rx="2"/>',
            f'<path class="spread" d="M{least:.1f} {top + BAR / 2}H{end:.1f}"/>',
            f'<text class="text" x="{max(LEFT + length, end) + 8:.1f}" y="{top + 13}">'
            f"{shown(mean)}</text>",
        ]
    return parts
