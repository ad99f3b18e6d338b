"""The frame of a picture: one style sheet for all, and the document around the drawing.

A picture is one file that needs no script, no font and no other file. Its colours follow the reader's choice
of a light or a dark screen; viewers that know no CSS variables (librsvg) show the light ones. Elements name
their style by class: ``p0`` to ``p7`` are the colours of lines.
"""

from __future__ import annotations

import re
from html import escape

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
.headline { font-size: 15px; font-weight: 600 }
.grid { stroke: var(--grid) }
.limit { stroke: var(--limit); stroke-dasharray: 2 3 }
.line { stroke: currentColor; stroke-width: 1.6; stroke-linejoin: round }
.line.dashed { stroke-dasharray: 5 3; stroke-width: 1.1 }
.mark { fill: currentColor }
.ring { fill: none; stroke: var(--text); stroke-width: 1.4 }
.decision { stroke: currentColor; stroke-width: 2.5 }
"""
"""The look of each class, by the names of the colours."""

STYLE = THEME + RULES
"""The style sheet of every picture, as CSS."""

_LIGHT = dict(re.findall(r"(--\w+): (#\w+)", THEME.partition("@media")[0]))

_WITHOUT_VARIABLES = re.sub(r"var\((--\w+)\)", lambda found: _LIGHT[found[1]], RULES)
"""The same look in light colours: where variables are not known, the style sheet after it changes nothing."""


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
