"""Panels over one time axis as SVG, one below the other: the charts of simulations and of the web page.

Every value holds from its moment until the next one, so all lines are steps. Colours and line styles are
those of ``svg.py``, by class: ``p0`` is the first policy, ``p1`` the second. The web page has no
policies: there ``p0`` is what decode workers do, ``p1`` prefill workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from dynaplan.lab.drawing.svg import Scale, colour_class, round_up

WIDTH = 1000
"""The usual width of all panels, in px."""

LEFT = 58
"""The px left of the plotted area, for the values beside the axis."""

RIGHT = 12
"""The px right of the plotted area."""

HEAD = 22
"""The px above a panel's plotted area, for its title."""

PLOT = 76
"""The height of a panel's plotted area, in px."""

FOOT = 14
"""The px below a panel's plotted area."""

LANE = 16
"""The height in px of the marks of one policy's decisions."""

APART = 1.6
"""The px between lines of equal counts, so that all are seen; 0 in a panel with a limit."""

DECIDED = "decode"
"""The key of the panel that the decisions are drawn below."""

CLOCK_STEPS_S = (60.0, 120.0, 300.0, 600.0, 900.0, 1800.0, 3600.0, 7200.0, 14400.0)
"""The round steps between the times of a ``ClockAxis``, in seconds."""

APART_PX = 70.0
"""The least px between two times of a ``ClockAxis``."""

DAY_S = 86400


@dataclass(frozen=True)
class Series:
    """One line: values from the moments ``at_s`` (seconds) on, None for no value.

    ``policy`` is the index of the policy that it belongs to; -1 belongs to all of them.
    """

    name: str
    at_s: Sequence[float]
    values: Sequence[float | None]
    policy: int = -1
    is_dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Lines on one axis, whose scale reaches the highest of them or ``limit``, which is drawn too.

    ``has_legend``: the names of its lines, and of the limit, stand beside the title. ``is_counted`` says that
    values are whole numbers; ``is_adaptive`` that the axis may be logarithmic.
    """

    key: str
    title: str
    series: Sequence[Series]
    limit: float | None = None
    limit_name: str = ""
    is_adaptive: bool = False
    is_counted: bool = False
    has_legend: bool = False


@dataclass(frozen=True)
class Lane:
    """The decisions of one policy: their moments in seconds, and each in words."""

    at_s: Sequence[float]
    texts: Sequence[str]


@dataclass(frozen=True)
class TimeAxis:
    """The time from 0 to ``end_s`` in seconds, written in ``unit``, which is ``unit_s`` seconds long.

    ``width`` is that of the panels, in px.
    """

    end_s: float
    width: float = WIDTH
    unit: str = field(init=False)
    unit_s: float = field(init=False)

    def __post_init__(self) -> None:
        names = {1.0: "s", 60.0: "min", 3600.0: "h"}
        unit_s = 1.0 if self.end_s <= 900 else 60.0 if self.end_s <= 4 * 3600 else 3600.0
        object.__setattr__(self, "unit", names[unit_s])
        object.__setattr__(self, "unit_s", unit_s)

    @property
    def right(self) -> float:
        """The right edge of the plotted areas, in px."""
        return self.width - RIGHT

    def x(self, at_s: float) -> float:
        """Return the x coordinate, in px, of a moment in seconds."""
        return LEFT + (self.right - LEFT) * min(max(at_s / self.end_s, 0.0), 1.0)

    def ticks(self) -> list[tuple[float, str]]:
        """Return some ten round moments, in seconds, with their labels."""
        step = round_up(self.end_s / self.unit_s / 10, (1, 2, 5, 10))
        number = int(self.end_s / self.unit_s / step + 1e-9)
        labels = [f"{index * step:g}" for index in range(number + 1)]
        labels[0] += f" {self.unit}"
        return [(index * step * self.unit_s, label) for index, label in enumerate(labels)]

    def text(self, at_s: float) -> str:
        """Return a moment with its unit: ``312 s``."""
        return f"{round(at_s / self.unit_s, 0 if self.unit_s == 1 else 2):g} {self.unit}"


@dataclass(frozen=True)
class ClockAxis(TimeAxis):
    """A time axis with the times of a clock, which shows ``began_s`` at 0, in seconds since midnight."""

    began_s: float = 0.0

    def ticks(self) -> list[tuple[float, str]]:
        """Return round times of the clock, in seconds from the beginning on, with their labels."""
        room = max(1.0, (self.right - LEFT) / APART_PX)
        step_s = next((each for each in CLOCK_STEPS_S if self.end_s / each <= room), CLOCK_STEPS_S[-1])
        first_s = -self.began_s % step_s
        moments = [first_s + index * step_s for index in range(int((self.end_s - first_s) / step_s) + 1)]
        return [(at_s, self.text(at_s)[:5]) for at_s in moments]

    def text(self, at_s: float) -> str:
        """Return the time of the clock: ``09:05:12``."""
        time_s = round(self.began_s + at_s) % DAY_S
        return f"{time_s // 3600:02}:{time_s // 60 % 60:02}:{time_s % 60:02}"


def draw(panels: Sequence[Panel], lanes: Sequence[Lane], axis: TimeAxis) -> tuple[str, float]:
    """Return the SVG elements of all panels and their height in px; decisions come below ``DECIDED``."""
    top, parts = 0.0, []
    for panel in panels:
        top += _legend_height(panel, axis)
        parts += [f'<g data-key="{panel.key}">', *_panel(panel, axis, top), "</g>"]
        top += HEAD + PLOT + FOOT
        if panel.key == DECIDED and any(each.at_s for each in lanes):
            parts += _lanes(lanes, axis, top)
            top += HEAD + LANE * len(lanes) + FOOT
    for at_s, label in axis.ticks():
        anchor = "start" if not at_s else "end" if axis.x(at_s) > axis.right - RIGHT else "middle"
        parts.append(
            f'<text class="time" x="{axis.x(at_s):.1f}" y="{top}" text-anchor="{anchor}">{label}</text>'
        )
    return "\n".join(parts), top + FOOT


def readable(
    panels: Sequence[Panel], axis: TimeAxis, policies: Sequence[str], decisions: Sequence[Lane]
) -> dict[str, Any]:
    """Return the drawn numbers as plain data, for the script that reads the charts at a moment.

    Times are in s, values in the units of the panels' titles. ``decisions`` are each policy's, in words.
    """
    return {
        "axis": {
            "end_s": axis.end_s,
            "unit": axis.unit,
            "unit_s": axis.unit_s,
            "left": LEFT,
            "right": axis.right,
            "width": axis.width,
        },
        "policies": list(policies),
        "panels": [
            {
                "key": panel.key,
                "series": [
                    {
                        "name": each.name,
                        "policy": each.policy,
                        "at_s": [round(at_s, 3) for at_s in each.at_s],
                        "values": [_short(value) for value in each.values],
                    }
                    for each in panel.series
                ],
            }
            for panel in panels
        ],
        "decisions": [
            [{"at_s": round(at_s, 3), "text": text} for at_s, text in zip(lane.at_s, lane.texts, strict=True)]
            for lane in decisions
        ],
    }


def _short(value: float | None) -> float | None:
    """Round to six digits; a whole number has no fraction."""
    if value is None:
        return None
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() else short


def _scale(panel: Panel) -> Scale:
    lines = [series.values for series in panel.series]
    return Scale.fitting(lines, panel.limit, is_adaptive=panel.is_adaptive, is_counted=panel.is_counted)


def _panel(panel: Panel, axis: TimeAxis, top: float) -> Iterator[str]:
    scale, floor = _scale(panel), top + HEAD + PLOT
    note = " (logarithmic)" if scale.is_log else ""
    above, legend = _legend_height(panel, axis), _legend(panel)
    title = escape(panel.title) + note
    if above:
        yield f'<text class="title" x="{LEFT}" y="{top + 14 - above}">{title}</text>'
        title = ""
    yield f'<text class="title" x="{LEFT}" y="{top + 14}">{title}{legend}</text>'
    yield f'<text class="read" x="{axis.right:g}" y="{top + 14}" text-anchor="end"></text>'
    yield from _grid(axis, top + HEAD, floor)
    for tick in scale.ticks():
        y = floor - PLOT * scale.place(tick)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{axis.right:g}"/>'
        yield f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:,g}</text>'
    if panel.limit is not None:
        y = floor - PLOT * scale.place(panel.limit)
        yield f'<path class="limit" d="M{LEFT} {y:.1f}H{axis.right:g}"/>'
    apart = APART if panel.is_counted and panel.limit is None else 0.0
    for each in panel.series:
        path = _steps(each, axis, scale, floor - apart * max(0, each.policy))
        dashed = " dashed" if each.is_dashed else ""
        yield f'<path class="line{colour_class(each.policy)}{dashed}" {_data(each.policy)}d="{path}"/>'


SOLID, DASHED, DOTTED = "\u2501", "\u254d", "\u2508"
"""The marks of lines in a legend."""


CHARACTER_PX, LINE = 6.6, 15
"""The usual width of a character, and the height of a line, in px."""


def _legend_height(panel: Panel, axis: TimeAxis) -> float:
    """Return the px that a title needs above its legend: 0 where both fit into one line."""
    names = _named_lines(panel)
    characters = len(panel.title) + sum(len(name) + 5 for *_, name in names)
    return LINE if names and characters * CHARACTER_PX > axis.right - LEFT else 0


def _named_lines(panel: Panel) -> list[tuple[str, str, str]]:
    """Return the class, mark and name of each line; none for one line without a limit, or no legend."""
    names = [
        (colour_class(each.policy), DASHED if each.is_dashed else SOLID, each.name) for each in panel.series
    ]
    if panel.limit is not None:
        names.append((" end", DOTTED, panel.limit_name))
    return names if panel.has_legend and len(names) > 1 else []


def _legend(panel: Panel) -> str:
    """Return the names of the lines, each behind its mark."""
    names = _named_lines(panel)
    return "".join(
        f'<tspan class="key{style}">&#160;&#160; {mark}</tspan><tspan class="name"> {escape(name)}</tspan>'
        for style, mark, name in names
    )


def _steps(series: Series, axis: TimeAxis, scale: Scale, floor: float) -> str:
    """Return a path of horizontals and verticals, with a gap for a missing value."""
    path, before = "", None
    for at_s, value in zip(series.at_s, series.values, strict=True):
        if at_s >= axis.end_s:
            break
        if value == before:
            continue
        x = f"{axis.x(at_s):.1f}"
        if before is not None:
            path += f"H{x}"
        if value is not None:
            y = f"{floor - PLOT * scale.place(value):.1f}"
            path += f"M{x} {y}" if before is None else f"V{y}"
        before = value
    return path if before is None else f"{path}H{axis.x(axis.end_s):.1f}"


def _lanes(lanes: Sequence[Lane], axis: TimeAxis, top: float) -> Iterator[str]:
    yield f'<text class="title" x="{LEFT}" y="{top + 14}">Decisions that changed something</text>'
    yield from _grid(axis, top + HEAD, top + HEAD + LANE * len(lanes))
    for policy, lane in enumerate(lanes):
        y = top + HEAD + LANE * policy + 3
        for at_s, text in zip(lane.at_s, lane.texts, strict=True):
            if at_s <= axis.end_s:
                yield f'<path class="decision{colour_class(policy)}" {_data(policy)}'
                yield f'd="M{axis.x(at_s):.1f} {y}v{LANE - 6}"><title>{escape(text)}</title></path>'


def _grid(axis: TimeAxis, top: float, floor: float) -> Iterator[str]:
    lines = "".join(f"M{axis.x(at_s):.1f} {top}V{floor}" for at_s, _ in axis.ticks())
    yield f'<path class="grid" d="{lines}"/>'


def _data(policy: int) -> str:
    return f'data-policy="{policy}" ' if policy >= 0 else ""
