"""Plots of one quantity over another: points, lines through them, a limit and a chosen point.

One plot is one SVG file of fixed size, with a legend beside it. Both axes are linear.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from dynaplan.lab.drawing.svg import COLOURS, Scale, colour_class, document

WIDTH = 900
"""The width of a plot in px, its legend included."""

HEIGHT = 440
"""The height of a plot in px, without its title."""

LEFT = 76
"""The left edge of the plotted area in px; the labels of y lie left of it."""

RIGHT = 664
"""The right edge of the plotted area in px; the legend lies right of it."""

TOP = 8
"""The upper edge of the plotted area in px."""

BOTTOM = 392
"""The lower edge of the plotted area in px; the labels of x lie below it."""

PARTS = 5
"""The number of parts that grid lines divide each axis into."""

LEGEND_LINE = 20
"""The height in px of one line of the legend."""


@dataclass(frozen=True)
class Curve:
    """Named points (x, y), joined by straight lines in their order; either can be left out."""

    name: str
    points: Sequence[tuple[float, float]]
    has_line: bool = True
    has_marks: bool = True


@dataclass(frozen=True)
class Plot:
    """A plot with its labels.

    ``limit`` is a vertical dotted line: its x and its name. ``chosen`` is a point to draw a ring around.
    """

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    limit: tuple[float, str] | None = None
    chosen: tuple[float, float] | None = None


def plot_svg(plot: Plot) -> str:
    points = [point for curve in plot.curves for point in curve.points]
    if plot.chosen:
        points.append(plot.chosen)
    xs = [x for x, _ in points] + ([plot.limit[0]] if plot.limit else [])
    area = _Area(Scale.spanning(xs, PARTS), Scale.spanning([0.0, *(y for _, y in points)], PARTS))
    parts = [*_axes(plot, area)]
    for index, curve in enumerate(plot.curves):
        parts += _curve(curve, index, area)
    if plot.limit:
        parts.append(f'<path class="limit" d="M{area.x(plot.limit[0]):.1f} {TOP}V{BOTTOM}"/>')
    if plot.chosen:
        x, y = plot.chosen
        parts.append(f'<circle class="ring" cx="{area.x(x):.1f}" cy="{area.y(y):.1f}" r="8"/>')
    return document(plot.title, "\n".join([*parts, *_legend(plot)]), WIDTH, HEIGHT)


@dataclass(frozen=True)
class _Area:
    """The plotted area: values to px."""

    horizontal: Scale
    vertical: Scale

    def x(self, value: float) -> float:
        return LEFT + (RIGHT - LEFT) * self.horizontal.place(value)

    def y(self, value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * self.vertical.place(value)


def _axes(plot: Plot, area: _Area) -> Iterator[str]:
    for tick in area.horizontal.ticks(PARTS):
        x = area.x(tick)
        yield f'<path class="grid" d="M{x:.1f} {TOP}V{BOTTOM}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{BOTTOM + 16}" text-anchor="middle">{_number(tick)}</text>'
    for tick in area.vertical.ticks(PARTS):
        y = area.y(tick)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>'
        yield f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>'
    middle = (LEFT + RIGHT) / 2
    yield f'<text x="{middle:g}" y="{BOTTOM + 38}" text-anchor="middle">{escape(plot.x_label)}</text>'
    place = f'transform="translate(16 {(TOP + BOTTOM) / 2:g}) rotate(-90)"'
    yield f'<text {place} text-anchor="middle">{escape(plot.y_label)}</text>'


def _curve(curve: Curve, index: int, area: _Area) -> Iterator[str]:
    places = [f"{area.x(x):.1f} {area.y(y):.1f}" for x, y in curve.points]
    colour = colour_class(index)
    if len(places) > 1 and curve.has_line:
        yield f'<path class="line{colour}{_dashes(index)}" d="M{"L".join(places)}"/>'
    for place in places if curve.has_marks else ():
        x, y = place.split()
        yield f'<circle class="mark{colour}" cx="{x}" cy="{y}" r="3.5"/>'


def _legend(plot: Plot) -> Iterator[str]:
    samples = [(curve.name, _sample(curve, index)) for index, curve in enumerate(plot.curves)]
    if plot.limit:
        samples.append((plot.limit[1], '<path class="limit" d="M0 -10V2"/>'))
    if plot.chosen:
        samples.append(("chosen", '<circle class="ring" cx="0" cy="-4" r="6"/>'))
    for line, (name, sample) in enumerate(samples):
        place = f'transform="translate({RIGHT + 22} {TOP + 12 + LEGEND_LINE * line})"'
        yield f'<g {place}>{sample}<text x="14">{escape(name)}</text></g>'


def _sample(curve: Curve, index: int) -> str:
    colour = colour_class(index)
    if curve.has_marks:
        return f'<circle class="mark{colour}" cx="0" cy="-4" r="4"/>'
    return f'<path class="line{colour}{_dashes(index)}" d="M-6 -4H6"/>'


def _dashes(index: int) -> str:
    """Return the style class by which a line differs from the earlier one of its colour, "" for the first."""
    return " dashed" if index >= COLOURS else ""


def _number(value: float) -> str:
    """Format with a separator of thousands and at most four digits after it, 0 without a sign."""
    return f"{round(value, 4) or 0:,.6g}"
