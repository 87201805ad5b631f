"""Draw an SVG plot of the activity of the GPUs where pods landed."""

from collections.abc import Mapping, Sequence
from typing import Final
from xml.sax.saxutils import escape

WIDTH: Final = 720
HEIGHT: Final = 420
LEFT: Final = 64
RIGHT: Final = 24
TOP: Final = 64
BOTTOM: Final = 64
COLOURS: Final = ("#0072b2", "#d55e00", "#555555")
"""Colors that people with color blindness can distinguish, supported by different dashes."""
DASHES: Final = ("", "8 4", "2 3")
TICKS: Final = 5
MOST_STEPS: Final = 500


def draw(title: str, activities: Mapping[str, Sequence[float]]) -> str:
    """Draw cumulative curves: the share of pods whose GPUs were at most so active.

    Args:
        title: heading of the plot.
        activities: mean activity of each pod's GPUs, as a ratio, by curve name.
    """
    curves = [(name, sorted(values)) for name, values in activities.items() if values]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="13" role="img" aria-label="{_text(title)}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="bold">{_text(title)}</text>',
        *_axes(),
        *(line for at, curve in enumerate(curves) for line in _curve(at, *curve)),
    ]
    if not curves:
        parts.append(f'<text x="{LEFT + 16}" y="{TOP + 32}">no pod was placed</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes() -> list[str]:
    parts = []
    for tick in range(TICKS + 1):
        share = tick / TICKS
        x, y = _x(share), _y(share)
        parts += [
            f'<line x1="{x}" x2="{x}" y1="{_y(0)}" y2="{_y(1)}" stroke="#dddddd"/>',
            f'<line x1="{_x(0)}" x2="{_x(1)}" y1="{y}" y2="{y}" stroke="#dddddd"/>',
            f'<text x="{x}" y="{_y(0) + 20}" text-anchor="middle">{share:.0%}</text>',
            f'<text x="{_x(0) - 8}" y="{y + 4}" text-anchor="end">{share:.0%}</text>',
        ]
    middle = (_x(0) + _x(1)) / 2
    label = "activity of the GPUs where a pod landed, at most"
    parts += [
        f'<text x="{middle}" y="{HEIGHT - 18}" text-anchor="middle">{label}</text>',
        f'<text x="{_x(0) - 52}" y="{TOP - 10}">share of pods</text>',
    ]
    return parts


def _curve(at: int, name: str, values: Sequence[float]) -> list[str]:
    """Return the SVG elements of one curve and its legend."""
    colour, dash = COLOURS[at % len(COLOURS)], DASHES[at % len(DASHES)]
    style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
    count = len(values)
    step = max(count // MOST_STEPS, 1)
    path, height = [f"M{_x(0)},{_y(0)}"], 0.0
    for number in [*range(0, count, step), count - 1]:
        x = _x(min(max(values[number], 0.0), 1.0))
        path.append(f"L{x},{_y(height)}")
        height = (number + 1) / count
        path.append(f"L{x},{_y(height)}")
    path.append(f"L{_x(1)},{_y(1)}")
    mean = sum(values) / count
    y = TOP + 150 + 20 * at
    legend = f"{name}: {count} pods, mean {mean:.1%}"
    return [
        f'<path d="{" ".join(path)}" {style}/>',
        f'<line x1="{_x(0.45)}" x2="{_x(0.5)}" y1="{y}" y2="{y}" {style}/>',
        f'<text x="{_x(0.51)}" y="{y + 4}">{_text(legend)}</text>',
    ]


def _x(share: float) -> float:
    return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)


def _y(share: float) -> float:
    return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)


def _text(text: str) -> str:
    return escape(text, {'"': "&quot;"})
