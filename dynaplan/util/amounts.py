"""Amounts of time and memory as people write them."""

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


UNIT_BYTES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
"""The bytes of each unit; with an ``i``, as in ``GiB``, the next power of 1024."""

_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(?:([kmgt])(i?)b?|b)?", re.ASCII)


def bytes_of(text: str) -> int | None:
    """Return the bytes that ``500MB``, ``5 GiB``, ``1.5G`` or ``4096`` say; None for any other text."""
    found = _SIZE.fullmatch(text.strip().lower())
    if not found:
        return None
    number, unit, binary = found.groups()
    base = 1 if not unit else 1024 ** ("kmgt".index(unit) + 1) if binary else UNIT_BYTES[unit]
    return int(float(number) * base)
