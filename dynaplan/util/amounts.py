"""Amounts of time and memory as people write them."""

from __future__ import annotations

import re

_DURATION = re.compile(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?", re.ASCII)


def seconds_of(text: str) -> int | None:
    """Return the seconds that ``90s``, ``10m``, ``2h``, ``1d`` or ``1h30m`` say; None for any other text."""
    found = _DURATION.fullmatch(text.strip().lower())
    if not found or not found.group():
        return None
    days, hours, minutes, seconds = (int(each or 0) for each in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(?:([kmgt])(i?)b?|b)?", re.ASCII)


def bytes_of(text: str) -> int | None:
    """Return the bytes that ``500MB``, ``5 GiB``, ``1.5G`` or ``4096`` say; None for any other text."""
    found = _SIZE.fullmatch(text.strip().lower())
    if not found:
        return None
    number, unit, binary = found.groups()
    power = "kmgt".index(unit) + 1 if unit else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


GIB = 2**30
"""What people mean by the GB of a GPU: one of 80 GB has 79.6 GiB, and 85.5 times ten to the ninth bytes."""


def gib(size_bytes: float) -> str:
    """Return an amount of memory or disk as it is said everywhere: ``13.4 GiB``, ``98 MiB``."""
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB / 10 else f"{size_bytes / 2**20:.0f} MiB"


def gib_of(used_bytes: float, whole_bytes: float) -> str:
    """Return a part and its whole, in whole numbers: ``71 of 80 GiB``."""
    return f"{used_bytes / GIB:.0f} of {whole_bytes / GIB:.0f} GiB"


def unit_missing(size_bytes: int) -> str:
    """Return the amount that was meant by a number of bytes too small for one: ``20GB`` for 20.

    Empty for a number that is large enough.
    """
    if size_bytes >= FEWEST_BYTES:
        return ""
    return f"{size_bytes}GB" if size_bytes <= MOST_GB else f"{size_bytes}MB"


FEWEST_BYTES = 10**6
"""Less than this nobody gives to anything."""

MOST_GB = 2000
"""A larger number is not one of GB."""
