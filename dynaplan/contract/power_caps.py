"""Caps on the power of GPUs: all day, ``250W``, or at hours of every day, ``22:00-07:00=250W``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from dynaplan.contract.holds import DailyHours, WallClock, parse_hours

WHOLE_DAY = parse_hours("00:00-24:00")

_CAP = re.compile(r"(?:([\d:-]+)=)?(\d+)\s*[wW]", re.ASCII)


@dataclass(frozen=True)
class PowerCap:
    """The most watts that a GPU is to draw at these hours."""

    watts: float
    hours: DailyHours = WHOLE_DAY


def parse_power_cap(text: str) -> PowerCap:
    """Read ``22:00-07:00=250W`` or ``250W``; raises ValueError with what was expected."""
    found = _CAP.fullmatch(text.strip())
    if not found or not int(found[2]):
        raise ValueError(f"{text[:40]!r}: expected watts, with hours or without: 22:00-07:00=250W")
    return PowerCap(float(found[2]), parse_hours(found[1]) if found[1] else WHOLE_DAY)


def cap_at(caps: Iterable[PowerCap], now_s: float, wall: WallClock) -> float | None:
    """Return the least of the caps that hold at that moment, seconds since 1970-01-01 UTC; None for none."""
    return min((each.watts for each in caps if each.hours.is_open_at(now_s, wall)), default=None)
