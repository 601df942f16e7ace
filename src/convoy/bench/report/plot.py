"""Draw lines in a plane as SVG by hand: a plot needs no library, and a report no browser."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 640, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 620, 50, 345
# The palette of Okabe and Ito, which people with any colour vision can tell apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_STEPS = 5

Point = tuple[float, float]


def plot(title: str, x_name: str, y_name: str, lines: Mapping[str, Sequence[Point]]) -> str:
    """Return an SVG document. The x axis doubles, as counts of requests do; the y axis begins at 0."""
    points = [point for line in lines.values() for point in line]
    low, high = (f(math.log2(x) for x, _ in points) for f in (min, max))
    top = _round_up(max(y for _, y in points))

    def place(x: float, y: float) -> tuple[float, float]:
        share = (math.log2(x) - low) / (high - low) if high > low else 0.5
        return _LEFT + share * (_RIGHT - _LEFT), _BOTTOM - y / top * (_BOTTOM - _TOP)

    parts = [_text(_WIDTH / 2, 24, title, "middle"), _text((_LEFT + _RIGHT) / 2, 388, x_name, "middle")]
    parts.append(_text(8, 42, y_name, "start"))
    for step in range(_STEPS + 1):
        value = top * step / _STEPS
        _, y = place(2**low, value)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{value:g}", "end"))
    for x in sorted({x for x, _ in points}):
        parts.append(_text(place(x, 0)[0], _BOTTOM + 20, f"{x:g}", "middle"))
    for number, (name, line) in enumerate(lines.items()):
        parts += _line(name, number, [place(x, y) for x, y in line])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _line(name: str, number: int, places: Sequence[Point]) -> list[str]:
    colour = _COLOURS[number % len(_COLOURS)]
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    key = _TOP + 8 + 18 * number
    return [
        f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places),
        f'<path d="M{_LEFT + 12} {key}h20" stroke="{colour}" stroke-width="2"/>',
        _text(_LEFT + 38, key + 4, name, "start"),
    ]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _round_up(value: float) -> float:
    """Return the next of 1, 2 and 5 times a power of ten, so that the scale has short numbers."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next((power * step for step in (1, 2, 5) if power * step >= value), power * 10)
