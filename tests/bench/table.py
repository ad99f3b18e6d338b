"""Repeated measurements, and the table that shows them: medians, minima and maxima."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Row:
    """One quantity, measured several times; ``aim`` is what the project wants, in the same unit."""

    name: str
    unit: str
    values: Sequence[float]
    aim: float | None = None
    more_is_better: bool = False
    note: str = ""

    @property
    def meets_aim(self) -> str:
        if self.aim is None:
            return ""
        middle = median(self.values)
        return "yes" if (middle >= self.aim if self.more_is_better else middle <= self.aim) else "no"


HEADER = "| what | median | min | max | unit | aim | met | n |\n|---|--:|--:|--:|---|--:|---|--:|"


def line(row: Row) -> str:
    """One line of the table."""
    middle, low, high = median(row.values), min(row.values), max(row.values)
    aim = "" if row.aim is None else f"{row.aim:g}"
    name = f"{row.name} ({row.note})" if row.note else row.name
    figures = f"{middle:.3g} | {low:.3g} | {high:.3g}"
    return f"| {name} | {figures} | {row.unit} | {aim} | {row.meets_aim} | {len(row.values)} |"


def cell(values: Sequence[float]) -> str:
    """A median, with the least and the most, as a cell of a table."""
    return f"{median(values):.3g} ({min(values):.3g}-{max(values):.3g})"


def matrix(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table whose first column names its lines."""
    rule = ["---", *("--:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(each)} |" for each in (head, rule, *lines))
