"""The time zone of this machine, and zones by their names."""

from __future__ import annotations

import os
from datetime import UTC, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

LOCAL_TIME = Path("/etc/localtime")
_FOLDER = "zoneinfo/"
_UTC_NAMES = ("UTC", "Etc/UTC", "Universal", "Etc/Universal", "Zulu", "Etc/Zulu")


def zone_of(name: str) -> tzinfo:
    """Return the zone of that name, such as ``Europe/Berlin``; raises ValueError for an unknown one."""
    if name in _UTC_NAMES:
        return UTC
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
