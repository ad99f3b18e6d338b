"""Hours of every day on the wall clock: ``09:00-17:00``.

Hours whose end is not after their beginning go on past midnight. When the clock is set forward, what of them
is skipped does not happen; when it is set back, an hour that comes twice is open twice. Pure: the wall clock
is an argument.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

EXAMPLE = "09:00-17:00"

WallClock = Callable[[float], int]
"""Returns the minute of the day at a moment, seconds since 1970-01-01 UTC."""

_DAY_MINUTES = 24 * 60
_QUARTER_S = 900
_LOOK_AHEAD_QUARTERS = 2 * 96 + 1
_HOURS = re.compile(r"(\d\d?):(\d\d)-(\d\d?):(\d\d)", re.ASCII)


@dataclass(frozen=True)
class DailyHours:
    """The time of every day from ``begin`` until before ``end``, in minutes of the day."""

    begin: int
    end: int

    def is_open_at(self, now_s: float, wall: WallClock) -> bool:
        """Tell whether they are open at that moment, seconds since 1970-01-01 UTC, by that clock."""
        minute = wall(now_s)
        if self.begin < self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end

    def next_change_s(self, now_s: float, wall: WallClock) -> float | None:
        """Return the moment at which they open, or close; None when they never do.

        The wall clock reaches the beginning or the end at its time, or jumps over it at a change of the
        clock, which every zone has at a quarter of an hour of UTC: one of these moments is the answer.
        """
        is_open = self.is_open_at(now_s, wall)
        moments = (each for each in self._moments(now_s, wall) if each > now_s)
        return next((each for each in moments if self.is_open_at(each, wall) != is_open), None)

    def _moments(self, now_s: float, wall: WallClock) -> Iterator[float]:
        """Yield every moment at which they can change, in order: quarters of an hour, and edges in them."""
        first_s = now_s // _QUARTER_S * _QUARTER_S
        for number in range(_LOOK_AHEAD_QUARTERS):
            at_s = first_s + number * _QUARTER_S
            minute = wall(at_s)
            until = sorted((edge - minute) % _DAY_MINUTES * 60 for edge in (self.begin, self.end))
            yield at_s
            yield from (at_s + later_s for later_s in until if 0 < later_s < _QUARTER_S)

    def __str__(self) -> str:
        """Write them in the one form that ``parse_hours`` reads back to the same."""
        return "-".join(f"{minute // 60:02}:{minute % 60:02}" for minute in (self.begin, self.end))


def parse_hours(text: str) -> DailyHours:
    """Read ``09:00-17:00``; raises ValueError with what was expected."""
    found = _HOURS.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{text[:40]!r}: expected hours of every day, such as '{EXAMPLE}'")
    begin, end = _minute(found[1], found[2]), _minute(found[3], found[4])
    if begin == end:
        raise ValueError(f"'{text}' begins and ends at once; the whole day is 00:00-24:00")
    if begin == _DAY_MINUTES:
        raise ValueError(f"'{text}': no day has anything after 24:00; it begins at 00:00 of the next day")
    return DailyHours(begin, end)


def _minute(hour: str, minute: str) -> int:
    minutes = int(hour) * 60 + int(minute)
    if int(minute) > 59 or minutes > _DAY_MINUTES:
        raise ValueError(f"'{hour}:{minute}' is no time of a day: expected 00:00 to 24:00")
    return minutes
