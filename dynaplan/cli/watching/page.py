"""Lays a view out as text, as wide as the screen: ``status`` prints it, ``--watch`` and ``top`` draw it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dynaplan.cli.watching.view import LEAST_NEEDED, View
from dynaplan.util import screen
from dynaplan.util.tables import fold, text_table

GPUS_LEAST_NEEDED = ("NAME", "WATTS", "MEMORY")
"""The columns of the GPUs that a narrow screen does without, the first first."""


def page(view: View, width: int = 0) -> str:
    """Return the whole text; ``width`` is that of the screen in columns, 0 for any."""
    parts = [
        below(filter(None, [view.title, view.service, view.places]), width),
        below(view.load, width),
        decision(view, width),
        workers(view, width),
        gpus(view, width),
        *(below([note], width) for note in view.notes),
    ]
    return "\n\n".join(filter(None, parts))


def below(lines: Iterable[str], width: int) -> str:
    """Return the lines below one another, folded."""
    return "\n".join(fold(line, width, "  ") for line in lines)


def decision(view: View, width: int = 0) -> str:
    """Return the planner's last decision in one line, or two; empty before there is one."""
    return below([f"last decision {view.decision}"], width) if view.decision else ""


def workers(view: View, width: int = 0) -> str:
    """Lay the workers out under their headings; a narrow screen does without ``LEAST_NEEDED``."""
    return worker_table(view.workers, view.short_workers, width)


def worker_table(rows: Sequence[Sequence[str]], short_rows: Sequence[Sequence[str]], width: int = 0) -> str:
    """Lay rows out, or the short ones where those are wider than ``width`` columns (0 for any width)."""
    is_narrow = bool(width) and max(map(len, text_table(rows).splitlines())) > width
    chosen = short_rows if is_narrow else rows
    return text_table(chosen, width=width, dropping=LEAST_NEEDED, paint={"STATE": screen.state_coloured})


def gpus(view: View, width: int = 0) -> str:
    """Lay the GPUs out under their headings; empty without any."""
    if not view.gpus:
        return ""
    is_same = len({row[1] for row in view.gpus[1:]}) == 1
    rows = [(*row[:1], *row[2:]) for row in view.gpus] if is_same else view.gpus
    return f"{view.gpus_title}\n{text_table(rows, width=width, dropping=GPUS_LEAST_NEEDED)}"
