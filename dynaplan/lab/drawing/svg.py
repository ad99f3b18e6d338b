"""The frame of a picture: scales of its axes, one style sheet for all, the document around the drawing.

A picture is one file that needs no script, no font and no other file. Its colours follow the reader's choice
of a light or a dark screen; viewers that know no CSS variables (librsvg) show the light ones. Elements name
their style by class: ``p0`` to ``p7`` are the colours of lines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LOGARITHMIC_RATIO = 8.0
"""An adaptive scale is logarithmic when one line reaches this many times as high as another, or the limit.

What is lower than 1 counts as 1: up to there the logarithm of value + 1 is almost a straight line.
"""

MAX_TICKS = 5
"""The largest number of values written beside a logarithmic axis."""

_ROUND_DIGITS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)


@dataclass(frozen=True)
class Scale:
    """Maps values to 0 (bottom or left) ... 1 (top or right), linearly or by the logarithm of value + 1."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def fitting(
        cls,
        lines: Sequence[Sequence[float | None]],
        limit: float | None = None,
        *,
        is_adaptive: bool = False,
        is_counted: bool = False,
    ) -> Scale:
        """Return the scale from 0 on that shows these lines and the limit.

        ``is_adaptive`` allows a logarithmic one, which begins at the lowest value, unless that is below 1.
        ``is_counted``: the values are whole numbers.
        """
        reached = [max(filter(None, values), default=0.0) for values in lines]
        limits = [limit] if limit else []
        high = max([*reached, *limits], default=0.0)
        lowest = min((top for top in [*reached, *limits] if top > 0), default=0.0)
        if is_adaptive and max(reached, default=0.0) > LOGARITHMIC_RATIO * max(lowest, 1.0):
            shown = [*limits, *(value for values in lines for value in values if value is not None)]
            low = min(shown)
            return cls(low if low >= 1 else 0.0, high * 1.1, is_log=True)
        if is_counted:
            return cls(0.0, max(2.0, 2 * math.ceil(high / 2)))
        return cls(0.0, 4 * round_up(high / 4) if high else 1.0)

    @classmethod
    def spanning(cls, values: Sequence[float], parts: int) -> Scale:
        """Return the linear scale around these values, from 0 on if that is near.

        It has that number of parts, each of a round number, and begins at a multiple of that number.
        """
        low, high = min(values, default=0.0), max(values, default=1.0)
        if 0 <= low <= high / 2:
            low = 0.0
        step = round_up((high - low or abs(high) or 1.0) / parts)
        while (begin := math.floor(low / step + 1e-9)) * step + parts * step < high * (1 - 1e-9):
            step = round_up(1.01 * step)
        return cls(begin * step, (begin + parts) * step)

    def place(self, value: float) -> float:
        """Return the value's place, from 0 for ``low`` until 1 for ``high``."""
        if not self.is_log:
            return (value - self.low) / (self.high - self.low)
        bottom = math.log1p(self.low)
        return (math.log1p(value) - bottom) / (math.log1p(self.high) - bottom)

    def ticks(self, parts: int = 2) -> list[float]:
        """Return the values to write from ``low`` to ``high``: the ends of ``parts`` equal parts, or decades.

        There are values between decades, or decades are left out, as ``MAX_TICKS`` has it; and 0 where the
        axis begins with it.
        """
        if not self.is_log:
            return [self.low + (self.high - self.low) * part / parts for part in range(parts + 1)]
        decades = range(math.floor(math.log10(max(self.low, 1.0))), math.ceil(math.log10(self.high)) + 1)
        whole_decades = [((1,), every) for every in range(1, len(decades) + 1)]
        for digits, every in (((1, 2, 5), 1), ((1, 3), 1), *whole_decades):
            ticks = [digit * 10.0**decade for decade in decades[::every] for digit in digits]
            ticks = [tick for tick in ticks if self.low <= tick <= self.high]
            if len(ticks) <= MAX_TICKS:
                break
        return [0.0, *ticks] if self.low == 0 else ticks


def round_up(value: float, digits: Sequence[float] = _ROUND_DIGITS) -> float:
    """Return the next number that is one of the digits times a power of ten; 1 for 0."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(digit * power for digit in digits if digit * power >= value * (1 - 1e-9))


COLOURS = 8
"""The number of line colours; a ninth line has the colour of the first."""

TITLE_HEIGHT = 34
"""The height in px of the title above the drawing."""

THEME = """\
:root, svg {
  color-scheme: light dark;
  --surface: #fff; --text: #1c2026; --muted: #5b6470; --grid: #e2e5e9; --limit: #b3261e;
  --p0: #0068b5; --p1: #c2500a; --p2: #00805a; --p3: #9440b0;
  --p4: #8a6a00; --p5: #0f7f93; --p6: #bd2a72; --p7: #5f6670;
}
@media (prefers-color-scheme: dark) {
  :root, svg {
    --surface: #14171b; --text: #e8eaed; --muted: #a2abb6; --grid: #2c323a; --limit: #ff8a80;
    --p0: #58aef0; --p1: #ff9457; --p2: #3dcb9b; --p3: #cf97ea;
    --p4: #dcb93f; --p5: #4fc6da; --p6: #f47db3; --p7: #b4bbc4;
  }
}
"""
"""The colours by name: for a light screen, then for a dark one."""

RULES = """\
svg { color: var(--text); font: 12px system-ui, "DejaVu Sans", sans-serif }
.p0 { --own: var(--p0); color: var(--p0) }
.p1 { --own: var(--p1); color: var(--p1) }
.p2 { --own: var(--p2); color: var(--p2) }
.p3 { --own: var(--p3); color: var(--p3) }
.p4 { --own: var(--p4); color: var(--p4) }
.p5 { --own: var(--p5); color: var(--p5) }
.p6 { --own: var(--p6); color: var(--p6) }
.p7 { --own: var(--p7); color: var(--p7) }
svg text { fill: var(--text) }
svg path { fill: none }
.surface { fill: var(--surface) }
.title { font-weight: 600 }
svg .tick, svg .time { fill: var(--muted); font-size: 11px }
.legend { font-size: 11.5px }
.name { font-weight: 400 }
.key { font-weight: 400; fill: currentColor }
.key.end { fill: var(--limit) }
.headline { font-size: 15px; font-weight: 600 }
.grid { stroke: var(--grid) }
.limit { stroke: var(--limit); stroke-dasharray: 2 3 }
.line { stroke: currentColor; stroke-width: 1.6; stroke-linejoin: round }
.line.dashed { stroke-dasharray: 5 3; stroke-width: 1.1 }
.mark { fill: currentColor }
.ring { fill: none; stroke: var(--text); stroke-width: 1.4 }
.decision { stroke: currentColor; stroke-width: 2.5 }
"""
"""The style of each class, by the names of the colours."""

STYLE = THEME + RULES
"""The style sheet of every picture, as CSS."""

_LIGHT = dict(re.findall(r"(--\w+): (#\w+)", THEME.partition("@media")[0]))

_WITHOUT_VARIABLES = re.sub(r"var\((--\w+)\)", lambda found: _LIGHT[found[1]], RULES)
"""The same rules in light colours, for viewers that know no CSS variables: they ignore the sheet after it."""


def colour_class(index: int) -> str:
    """Return the style class of the line of that index, with a space before it; "" for a negative index."""
    return f" p{index % COLOURS}" if index >= 0 else ""


def document(title: str, drawing: str, width: float, height: float) -> str:
    """Return a whole SVG file: the title, and below it the drawing of that size in px."""
    size = f"{width:g} {height + TITLE_HEIGHT:g}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{width:g}" '
        f'height="{height + TITLE_HEIGHT:g}" role="img">\n<title>{escape(title)}</title>\n'
        f'<style>\n{_WITHOUT_VARIABLES}{STYLE}</style>\n<rect class="surface" width="100%" height="100%"/>\n'
        f'<text class="headline" x="12" y="22">{escape(title)}</text>\n'
        f'<g transform="translate(0 {TITLE_HEIGHT})">\n{drawing}\n</g>\n</svg>\n'
    )
