"""Line charts as SVG markup for self-contained pages: no scripts, styled by the page's classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 28
MAX_POINTS = 600
"""Limit of a line's points, close to its width in pixels; longer series are thinned."""
MAX_COLOURS = 8


@dataclass(frozen=True)
class Series:
    """A named line of points (x, y), in order of x."""

    name: str
    points: Sequence[tuple[float, float]]


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    from_zero: bool = False,
) -> str:
    """Return a chart with axes and a legend; a sentence if there are no points.

    Args:
        title: The text for screen readers.
        series: The lines; colours repeat after `MAX_COLOURS`.
        x_text, y_text: Format a value of the axis.
        from_zero: True to begin the y axis at 0.
    """
    drawn = [Series(each.name, thin(each.points)) for each in series if each.points]
    if not drawn:
        return f'<p class="empty">{escape(title)}: nothing was measured.</p>'
    points = [point for each in drawn for point in each.points]
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_low, y_high = (0.0 if from_zero else min(y for _, y in points)), max(y for _, y in points)
    y_ticks = ticks(y_low, y_high)
    y_low, y_high = min(y_low, y_ticks[0]), max(y_high, y_ticks[-1])

    def place_x(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (x - x_low) / ((x_high - x_low) or 1.0)

    def place_y(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - y_low) / ((y_high - y_low) or 1.0)

    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for tick in y_ticks:
        at = place_y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{at + 4:.1f}">{escape(y_text(tick))}</text>')
    for tick in ticks(x_low, x_high):
        at = place_x(tick)
        parts.append(f'<text class="x" x="{at:.1f}" y="{HEIGHT - 8}">{escape(x_text(tick))}</text>')
    for number, each in enumerate(drawn):
        path = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in each.points)
        colour = f"c{number % MAX_COLOURS}"
        if len(each.points) == 1:
            (x, y) = each.points[0]
            parts.append(f'<circle class="{colour}" cx="{place_x(x):.1f}" cy="{place_y(y):.1f}" r="3"/>')
        else:
            parts.append(f'<polyline class="{colour}" points="{path}"/>')
    parts.append("</svg>")
    if len(drawn) > 1:
        names = "".join(f'<li class="c{n % MAX_COLOURS}">{escape(each.name)}</li>' for n, each in enumerate(drawn))
        parts.append(f'<ul class="legend">{names}</ul>')
    return "".join(parts)


def thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most `MAX_POINTS` points: the lowest and the highest of each bin, so that spikes remain."""
    if len(points) <= MAX_POINTS:
        return list(points)
    bins = MAX_POINTS // 2
    kept: list[tuple[float, float]] = []
    for number in range(bins):
        first, last = number * len(points) // bins, (number + 1) * len(points) // bins
        part = range(first, last)
        pair = {min(part, key=lambda i: points[i][1]), max(part, key=lambda i: points[i][1])}
        kept += [points[index] for index in sorted(pair)]
    return kept


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` round numbers between ``low`` and ``high``, at least one."""
    span = high - low
    if not span > max(abs(high) * 1e-9, 1e-300):
        return [low]
    step = 10.0 ** math.floor(math.log10(span / count))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= count)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)] or [low]
