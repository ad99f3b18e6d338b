"""Hours of the week on the wall clock: ``09:00-17:00 mon-fri; 10:00-14:00 sat``.

A window without days is open on every day; one whose end is not after its beginning goes on past midnight,
and belongs to the day on which it begins. When the clock is set forward, what of a window is skipped does not
happen; when it is set back, an hour that comes twice is open twice. Pure: the wall clock is an argument.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
EXAMPLE = "09:00-17:00 mon-fri"
LONGEST_TEXT = 200
"""Characters of the longest text of hours."""

WallClock = Callable[[float], tuple[int, int]]
"""Returns day of the week, Monday 0, and minute of the day at a moment, seconds since 1970-01-01 UTC."""

_DAY_MINUTES = 24 * 60
_QUARTER_S = 900
_LOOK_AHEAD_DAYS = 8
_WINDOW = re.compile(r"(\d\d?):(\d\d)-(\d\d?):(\d\d)(?: +([a-z, -]+))?", re.ASCII)


@dataclass(frozen=True)
class HoursWindow:
    """The time of the day from ``begin`` until before ``end``, in minutes, on these days; Monday is 0."""

    begin: int
    end: int
    days: frozenset[int]

    def is_open(self, day: int, minute: int) -> bool:
        """Tell whether that minute of that day of the week is in it."""
        if self.begin < self.end:
            return day in self.days and self.begin <= minute < self.end
        yesterday = (day - 1) % 7
        return (day in self.days and minute >= self.begin) or (yesterday in self.days and minute < self.end)


@dataclass(frozen=True)
class Hours:
    """Windows of every week; any of them open is open."""

    windows: tuple[HoursWindow, ...]

    def is_open_at(self, now_s: float, wall: WallClock) -> bool:
        """Tell whether they are open at that moment, seconds since 1970-01-01 UTC, by that clock."""
        day, minute = wall(now_s)
        return any(window.is_open(day, minute) for window in self.windows)

    def next_change_s(self, now_s: float, wall: WallClock) -> float | None:
        """Return the moment at which they open, or close; None when they never do.

        The wall clock reaches a window's edge at an edge's time, or jumps over it at a change of the clock,
        which every zone has at a quarter of an hour of UTC: one of these moments is the answer.
        """
        is_open = self.is_open_at(now_s, wall)
        moments = (each for each in self._moments(now_s, wall) if each > now_s)
        return next((each for each in moments if self.is_open_at(each, wall) != is_open), None)

    def _moments(self, now_s: float, wall: WallClock) -> Iterator[float]:
        """Yield every moment at which they can change, in order: quarters of an hour, and edges in them."""
        edges = {minute for window in self.windows for minute in (window.begin, window.end)}
        first_s = now_s // _QUARTER_S * _QUARTER_S
        for number in range(_LOOK_AHEAD_DAYS * 96 + 1):
            at_s = first_s + number * _QUARTER_S
            _, minute = wall(at_s)
            until = sorted((edge - minute) % _DAY_MINUTES * 60 for edge in edges)
            yield at_s
            yield from (at_s + later_s for later_s in until if 0 < later_s < _QUARTER_S)

    def __str__(self) -> str:
        """Write them in the one form that ``parse_hours`` reads back to the same."""
        return "; ".join(map(_text_of, self.windows))


def parse_hours(text: str) -> Hours:
    """Read ``09:00-17:00 mon-fri``; raises ValueError with what was expected."""
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"expected at most {LONGEST_TEXT} characters")
    parts = [part.strip() for part in text.lower().split(";")]
    return Hours(tuple(map(_window, parts)))


def _window(text: str) -> HoursWindow:
    found = _WINDOW.fullmatch(text)
    if not found:
        raise ValueError(f"'{text}': expected hours and days, such as '{EXAMPLE}'")
    begin, end = _minute(found[1], found[2]), _minute(found[3], found[4])
    if begin == end:
        raise ValueError(f"'{text}' begins and ends at once; the whole day is 00:00-24:00")
    if begin == _DAY_MINUTES:
        raise ValueError(f"'{text}': no day has anything after 24:00; it begins at 00:00 of the next day")
    return HoursWindow(begin, end, frozenset(_days(found[5] or "mon-sun")))


def _minute(hour: str, minute: str) -> int:
    minutes = int(hour) * 60 + int(minute)
    if int(minute) > 59 or minutes > _DAY_MINUTES:
        raise ValueError(f"'{hour}:{minute}' is no time of a day: expected 00:00 to 24:00")
    return minutes


def _days(text: str) -> Iterator[int]:
    for part in text.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        begin, end = _day(first), _day(last) if dash else _day(first)
        yield from ((begin + number) % 7 for number in range((end - begin) % 7 + 1))


def _day(name: str) -> int:
    if name not in DAYS:
        raise ValueError(
            f"'{name}' is no day: expected {', '.join(DAYS)}, or some such as mon-fri or sat,sun"
        )
    return DAYS.index(name)


def _text_of(window: HoursWindow) -> str:
    times = "-".join(f"{minute // 60:02}:{minute % 60:02}" for minute in (window.begin, window.end))
    if len(window.days) == len(DAYS):
        return times
    return f"{times} {','.join(_runs(window.days))}"


def _runs(days: frozenset[int]) -> Iterator[str]:
    """Yield the days, three and more in a row as ``mon-wed``; rows end with Sunday."""
    row: list[int] = []
    for day in range(len(DAYS) + 1):
        if day in days:
            row.append(day)
            continue
        if len(row) > 2:
            yield f"{DAYS[row[0]]}-{DAYS[row[-1]]}"
        else:
            yield from (DAYS[each] for each in row)
        row = []
