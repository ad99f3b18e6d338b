"""Draws panels over one time axis as SVG: the same for the page and for the pictures in the documents.

Every value holds from its moment until the next one, so all lines are steps. Colours and line styles are
those of the style sheet, by class: ``p0`` is the first policy, ``p1`` the second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, LEFT, RIGHT = 1000, 58, 12
HEAD, PLOT, FOOT = 22, 76, 14
LANE = 16
APART = 1.6
"""Lines of equal counts lie so many pixels apart, so that all are seen; never beside a limit."""
DECIDED = "decode"
"""The panel that the decisions are drawn below."""

COLOURS = 8
"""So many policies have a colour of their own."""

MOST_ABOVE = 8.0
"""An adaptive axis is logarithmic when one line reaches so many times higher than another, or the limit."""


@dataclass(frozen=True)
class Series:
    """One line. ``policy`` is the index of the policy that it belongs to; -1 belongs to all of them."""

    name: str
    at_s: Sequence[float]
    values: Sequence[float | None]
    policy: int = -1
    is_dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Lines on one axis, from 0 or the lowest up to the highest or ``limit``, which is drawn too.

    ``is_counted`` are whole numbers; ``is_adaptive`` may be logarithmic.
    """

    key: str
    title: str
    series: Sequence[Series]
    limit: float | None = None
    is_adaptive: bool = False
    is_counted: bool = False


@dataclass(frozen=True)
class Lane:
    """The decisions of one policy: moments, and what is told of each."""

    at_s: Sequence[float]
    told: Sequence[str]


@dataclass(frozen=True)
class TimeAxis:
    """From 0 to ``end_s``, told in a unit of ``unit_s`` seconds."""

    end_s: float
    unit: str = field(init=False)
    unit_s: float = field(init=False)

    def __post_init__(self) -> None:
        names = {1.0: "s", 60.0: "min", 3600.0: "h"}
        unit_s = 1.0 if self.end_s <= 900 else 60.0 if self.end_s <= 4 * 3600 else 3600.0
        object.__setattr__(self, "unit", names[unit_s])
        object.__setattr__(self, "unit_s", unit_s)

    def x(self, at_s: float) -> float:
        """Where a moment is."""
        return LEFT + (WIDTH - LEFT - RIGHT) * min(max(at_s / self.end_s, 0.0), 1.0)

    def ticks(self) -> list[tuple[float, str]]:
        """Round moments, some ten of them, with their labels."""
        step = _round_up(self.end_s / self.unit_s / 10, (1, 2, 5, 10))
        number = int(self.end_s / self.unit_s / step + 1e-9)
        return [(index * step * self.unit_s, f"{index * step:g}") for index in range(number + 1)]

    def told(self, at_s: float) -> str:
        """A moment in words."""
        return f"{round(at_s / self.unit_s, 0 if self.unit_s == 1 else 2):g} {self.unit}"


@dataclass(frozen=True)
class Scale:
    """Values to heights, 0 at the bottom and 1 at the top: linear, or logarithmic of value + 1."""

    low: float
    high: float
    is_log: bool

    @classmethod
    def of(cls, panel: Panel) -> Scale:
        """What fits the panel's lines and its limit."""
        reached = [max(filter(None, each.values), default=0.0) for each in panel.series]
        limits = [panel.limit] if panel.limit else []
        high = max([*reached, *limits], default=0.0)
        lowest = min((each for each in [*reached, *limits] if each > 0), default=0.0)
        if panel.is_adaptive and max(reached, default=0.0) > MOST_ABOVE * lowest > 0:
            seen = [value for each in panel.series for value in each.values if value is not None]
            low = min(seen, default=0.0)
            return cls(low if low >= 1 else 0.0, high * 1.1, is_log=True)
        if panel.is_counted:
            return cls(0.0, max(2.0, 2 * math.ceil(high / 2)), is_log=False)
        return cls(0.0, 4 * _round_up(high / 4) if high else 1.0, is_log=False)

    def height(self, value: float) -> float:
        """Where a value is."""
        if not self.is_log:
            return value / self.high
        bottom = math.log1p(self.low)
        return (math.log1p(value) - bottom) / (math.log1p(self.high) - bottom)

    def ticks(self) -> list[float]:
        """A few round values."""
        if not self.is_log:
            return [self.high * quarter / 4 for quarter in (0, 2, 4)]
        decades = range(math.floor(math.log10(max(self.low, 1.0))), math.ceil(math.log10(self.high)) + 1)
        for digits in ((1, 2, 5), (1, 3), (1,)):
            ticks = [digit * 10.0**decade for decade in decades for digit in digits]
            ticks = [each for each in ticks if self.low <= each <= self.high]
            if len(ticks) <= 5:
                break
        return ticks


def _round_up(value: float, digits: Sequence[float] = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)) -> float:
    """The next of these digits times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(digit * power for digit in digits if digit * power >= value * (1 - 1e-9))


def draw(panels: Sequence[Panel], lanes: Sequence[Lane], axis: TimeAxis) -> tuple[str, float]:
    """The SVG of all panels, one below the other, and its height. The decisions come below the workers."""
    top, parts = 0.0, []
    for panel in panels:
        parts += [f'<g data-key="{panel.key}">', *_panel(panel, axis, top), "</g>"]
        top += HEAD + PLOT + FOOT
        if panel.key == DECIDED and any(each.at_s for each in lanes):
            parts += _lanes(lanes, axis, top)
            top += HEAD + LANE * len(lanes) + FOOT
    for at_s, label in axis.ticks():
        anchor = "start" if not at_s else "end" if axis.x(at_s) > WIDTH - 2 * RIGHT else "middle"
        unit = f" {axis.unit}" if not at_s else ""
        parts.append(
            f'<text class="time" x="{axis.x(at_s):.1f}" y="{top}" text-anchor="{anchor}">{label}{unit}</text>'
        )
    return "\n".join(parts), top + FOOT


def _panel(panel: Panel, axis: TimeAxis, top: float) -> Iterator[str]:
    scale, floor = Scale.of(panel), top + HEAD + PLOT
    note = " (logarithmic)" if scale.is_log else ""
    yield f'<text class="title" x="{LEFT}" y="{top + 14}">{escape(panel.title)}{note}</text>'
    yield f'<text class="read" x="{WIDTH - RIGHT}" y="{top + 14}" text-anchor="end"></text>'
    yield from _grid(axis, top + HEAD, floor)
    for tick in scale.ticks():
        y = floor - PLOT * scale.height(tick)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:,g}</text>'
    if panel.limit is not None:
        y = floor - PLOT * scale.height(panel.limit)
        yield f'<path class="limit" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
    apart = APART if panel.is_counted and panel.limit is None else 0.0
    for each in panel.series:
        path = _steps(each, axis, scale, floor - apart * max(0, each.policy))
        dashed = " dashed" if each.is_dashed else ""
        yield f'<path class="line{_whose(each.policy)}{dashed}" {_data(each.policy)}d="{path}"/>'


def _steps(series: Series, axis: TimeAxis, scale: Scale, floor: float) -> str:
    """A path of horizontals and verticals; where there is no value there is no line."""
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
            y = f"{floor - PLOT * scale.height(value):.1f}"
            path += f"M{x} {y}" if before is None else f"V{y}"
        before = value
    return path if before is None else f"{path}H{axis.x(axis.end_s):.1f}"


def _lanes(lanes: Sequence[Lane], axis: TimeAxis, top: float) -> Iterator[str]:
    yield f'<text class="title" x="{LEFT}" y="{top + 14}">Decisions that changed something</text>'
    yield from _grid(axis, top + HEAD, top + HEAD + LANE * len(lanes))
    for policy, lane in enumerate(lanes):
        y = top + HEAD + LANE * policy + 3
        for at_s, told in zip(lane.at_s, lane.told, strict=True):
            if at_s <= axis.end_s:
                yield f'<path class="decision{_whose(policy)}" {_data(policy)}'
                yield f'd="M{axis.x(at_s):.1f} {y}v{LANE - 6}"><title>{escape(told)}</title></path>'


def _grid(axis: TimeAxis, top: float, floor: float) -> Iterator[str]:
    lines = "".join(f"M{axis.x(at_s):.1f} {top}V{floor}" for at_s, _ in axis.ticks())
    yield f'<path class="grid" d="{lines}"/>'


def _whose(policy: int) -> str:
    return f" p{policy % COLOURS}" if policy >= 0 else ""


def _data(policy: int) -> str:
    return f'data-policy="{policy}" ' if policy >= 0 else ""
