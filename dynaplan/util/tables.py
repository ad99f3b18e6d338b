"""Tables and paragraphs as text, as wide as the reader's screen."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence

GAP = "  "
"""The space between two columns."""

CUT = "…"
"""The end of a cell that was cut."""

Paint = Mapping[str, Callable[[str], str]]
"""A function for a heading: it colours a cell of that column, padded already."""


def text_table(
    rows: Sequence[Sequence[str]], *, width: int = 0, dropping: Sequence[str] = (), paint: Paint | None = None
) -> str:
    """Lay the rows out, the headings first, in columns that are as wide as their longest cell.

    A table that is wider than ``width`` (0 for any width) loses the columns with the headings ``dropping``,
    one by one, until it fits, and names them below: ``--json`` has them. When that does not suffice, the
    longest cells are cut.
    """
    kept, dropped = list(rows), list[str]()
    for heading in dropping:
        if not width or _total(_widths(kept)) <= width or heading not in kept[0]:
            continue
        place = list(kept[0]).index(heading)
        kept = [[*row[:place], *row[place + 1 :]] for row in kept]
        dropped.append(heading)
    widths = _cut(_widths(kept), width) if width else _widths(kept)
    lines = [_line(row, widths, kept[0], paint if number else None) for number, row in enumerate(kept)]
    if dropped:
        lines.append(fold(f"(without {', '.join(dropped)}, which --json has)", width))
    return "\n".join(lines)


def fold(text: str, width: int, indent: str = "") -> str:
    """Break each line of the text between words at ``width`` columns (0 for any width).

    Continuations begin with ``indent``. A word that is longer than a line stays whole, to be copied.
    """
    if not width:
        return text
    return "\n".join(
        textwrap.fill(
            line,
            width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
        )
        for line in text.split("\n")
    )


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _cut(widths: Sequence[int], width: int) -> list[int]:
    """Return the columns' widths, the widest cut until all fit into ``width``; each keeps one character."""
    cut = list(widths)
    while _total(cut) > width and max(cut) > 1:
        cut[cut.index(max(cut))] -= 1
    return cut


def _line(row: Sequence[str], widths: Sequence[int], headings: Sequence[str], paint: Paint | None) -> str:
    """Return one line; spaces at its end are left out, those before a colour's end too."""
    last = len(row) - 1
    cells = []
    for place, (cell, width, heading) in enumerate(zip(row, widths, headings, strict=True)):
        shown = cell if len(cell) <= width else cell[: width - 1] + CUT
        painted = paint[heading](shown) if paint and heading in paint else shown
        cells.append(painted if place == last else painted + " " * (width - len(shown)))
    return GAP.join(cells).rstrip()
