"""Durations and moments as people write and read them, and the clocks of time zones."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime, tzinfo
from pathlib import Path


def clock(seconds: float) -> str:
    """Format a time as ``1:02:03``, or ``02:03`` below an hour, ``2 d 1:02:03`` from a day on."""
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute:02}:{second:02}"


LOCAL_TIME = Path("/etc/localtime")
_FOLDER = "zoneinfo/"
_UTC_NAMES = ("UTC", "Etc/UTC", "Universal", "Etc/Universal", "Zulu", "Etc/Zulu")


def local_time(at_unix_s: float) -> str:
    """Return a moment on the clock of this machine, ``2026-11-22 14:00:03``."""
    return datetime.fromtimestamp(at_unix_s).isoformat(" ", "seconds")


def zone_of(name: str) -> tzinfo:
    """Return the zone of that name, such as ``Europe/Berlin``; raises ValueError for an unknown one."""
    if name in _UTC_NAMES:
        return UTC
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError  # much, for a process that names no zone

    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"the time zone {name!r} is not known here") from None


def local_zone_name() -> str:
    """Return the name of this process's zone: of ``TZ``, else of the machine; ``UTC`` where none is set.

    Raises ValueError when its rules have no name, as in a ``TZ`` such as ``CET-1CEST``.
    """
    named = os.environ.get("TZ", "").removeprefix(":")
    if named:
        zone_of(named)
        return named
    target = os.path.realpath(LOCAL_TIME)
    if not LOCAL_TIME.exists():
        return "UTC"
    if _FOLDER not in target:
        raise ValueError(f"{LOCAL_TIME} does not tell the name of the time zone; name it in TZ")
    name = target.rpartition(_FOLDER)[2].removeprefix("posix/")
    zone_of(name)
    return name


def wall_clock(name: str) -> Callable[[float], int]:
    """Return the clock of a zone: the minute of the day at a Unix time.

    Raises ValueError for an unknown zone.
    """
    zone = zone_of(name)

    def wall(at_s: float) -> int:
        local = datetime.fromtimestamp(at_s, zone)
        return local.hour * 60 + local.minute

    return wall


def moment(at_s: float, zone_name: str) -> str:
    """Return a moment as people read it: ``Mon 2026-11-23 09:00 +0100``."""
    return datetime.fromtimestamp(at_s, zone_of(zone_name)).strftime("%a %Y-%m-%d %H:%M %z")
