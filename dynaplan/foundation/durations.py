"""Durations as people write and read them."""

from __future__ import annotations

import re

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
"""The seconds of each unit."""

_DURATION = re.compile(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?", re.ASCII)


def seconds_of(text: str) -> int | None:
    """Return the seconds that ``90s``, ``10m``, ``2h``, ``1d`` or ``1h30m`` say; None for any other text."""
    found = _DURATION.fullmatch(text.strip().lower())
    if not found or not found.group():
        return None
    days, hours, minutes, seconds = (int(each or 0) for each in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def clock(seconds: float) -> str:
    """Format a time as ``1:02:03``, or ``02:03`` below an hour, ``2 d 1:02:03`` from a day on."""
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute:02}:{second:02}"
