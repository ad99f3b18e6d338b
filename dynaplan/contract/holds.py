"""Holds and reservations: what a person has set for a time, or for hours of every day.

1. ``DailyHours``, ``09:00-17:00`` on the wall clock. Hours whose end is not after their beginning go on
   past midnight. When the clock is set forward, what of them is skipped does not happen; when it is set
   back, an hour that comes twice is open twice.
2. ``RoleHolds``: bounds on the number of workers of a role, which no planner's decision leaves. One JSON
   object under ``v1/{namespace}/planner/holds``, beside the desired counts, so that one transaction writes
   both: ``{"decode": {"at_least": 3, "at_most": 3, "until_s": 1795356000, ...}}``. ``{}`` releases all; a
   key that is missing was lost, and is written again from the statefile.
3. ``ReservedGpus``: GPUs that are taken from the deployment. One JSON object under
   ``v1/{namespace}/planner/reservations``, by the index of the GPU; the maker and the end are those of a
   hold, whose bounds mean nothing here: ``{"7": {"by": "alice", "until_s": 1795356000, ...}}``. One that
   ``dynaplan run`` makes is a *loan*: it lasts for as long as its ``holder``, a process, is alive.

A deadline is a time of the wall clock, in seconds since 1970-01-01 UTC: set the clock forward and a hold is
over sooner, set it back and it lasts longer. A deadline more than ``MAX_HOLD_S`` after the making is
refused. Pure: the wall clock is an argument.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.store_keys import SCALED_ROLES
from dynaplan.graph.lifecycle import Role
from dynaplan.process.identity import ProcessIdentity
from dynaplan.util.documents import (
    number_field,
    object_field,
    parse_object,
    shown,
    text_field,
    whole_field,
    whole_number,
)

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


HOLDS = "holds"
"""The name of the holds' key: ``store_keys.scaling_key``."""

MAX_HOLD_S = 366 * 86400
"""Longest time from the making of a hold with a deadline to that deadline, seconds."""

MAX_HELD_WORKERS = 10_000
"""Largest number in a hold: a bound beyond it is a mistake, and is not read."""

_MAX_CHARACTERS = 100
_OF_HOURS = ("at", "zone")
_OF_LOANS = ("command", "holder")

Zones = Callable[[str], WallClock]
"""Returns the clock of the time zone of that name, or raises ValueError."""


@dataclass(frozen=True)
class Hold:
    """Bounds on the workers of one role, and their maker.

    ``at_most`` None is "no upper bound". ``since_s`` and ``until_s`` are its making and its deadline,
    seconds since 1970-01-01 UTC; without a deadline it lasts until it is released. ``until`` is the deadline
    in words, in the zone of its maker. ``by`` is the name of the user ``uid``; ``pid`` and ``host`` tell the
    process that made it. With ``at`` it is in force only at these hours of the day in the zone ``zone``.
    With a ``holder`` it ends with that process, whatever the clock says: ``until_s`` is when the process is
    asked to. ``command`` is what the holder runs.
    """

    at_least: int = 0
    at_most: int | None = None
    since_s: float = 0.0
    until_s: float | None = None
    until: str = ""
    by: str = ""
    uid: int = 0
    pid: int = 0
    host: str = ""
    at: str = ""
    zone: str = ""
    command: str = ""
    holder: ProcessIdentity | None = None

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Hold:
        """Read ``dataclasses.asdict``'s form. Raises ValueError, and nothing else, for another one."""
        at_most = None if document.get("at_most") is None else _workers_field(document, "at_most")
        until_s = None if document.get("until_s") is None else number_field(document, "until_s")
        hold = cls(
            _workers_field(document, "at_least", 0),
            at_most,
            number_field(document, "since_s", 0.0),
            until_s,
            _words_field(document, "until"),
            _words_field(document, "by"),
            whole_field(document, "uid", 0),
            whole_field(document, "pid", 0),
            _words_field(document, "host"),
            _parse_hours_field(document),
            _words_field(document, "zone"),
            _words_field(document, "command"),
            ProcessIdentity.from_record(object_field(document, "holder")) if document.get("holder") else None,
        )
        if at_most is not None and at_most < hold.at_least:
            raise ValueError(f"at least {hold.at_least} and at most {at_most} workers: nothing is both")
        if hold.since_s and until_s is not None and not 0 < until_s - hold.since_s <= MAX_HOLD_S:
            raise ValueError(f"'until_s' is {until_s}: expected a time up to a year after 'since_s'")
        return hold

    def allows(self, workers: int) -> bool:
        return self.bounded(workers) == workers

    def bounded(self, workers: int) -> int:
        """Return the nearest number within the bounds."""
        at_least = max(workers, self.at_least)
        return at_least if self.at_most is None else min(at_least, self.at_most)

    def left_s(self, now_s: float) -> float | None:
        """Return the seconds until the deadline, below 0 after it; None without one, and with a holder."""
        return None if self.until_s is None or self.holder else self.until_s - now_s

    @property
    def is_exact(self) -> bool:
        return self.at_least == self.at_most

    @property
    def bounds(self) -> str:
        """The bounds in words, such as "at 3" or "at 2 or more"."""
        if self.is_exact:
            return f"at {self.at_least}"
        if self.at_most is None:
            return f"at {self.at_least} or more"
        return (
            f"between {self.at_least} and {self.at_most}" if self.at_least else f"at {self.at_most} or fewer"
        )

    def __str__(self) -> str:
        """Say the bounds, the maker and the end: "held at 3 by alice until 2026-11-22 14:00:00 +0100"."""
        maker = f" by {self.by}" if self.by else ""
        return f"held {self.bounds}{maker} {self.ending}"

    def is_open(self, now_s: float, zones: Zones) -> bool:
        """Tell whether its hours are open, if it has any; never where their time zone is not known."""
        if not self.at:
            return True
        try:
            return parse_hours(self.at).is_open_at(now_s, zones(self.zone))
        except ValueError:
            return False

    def to_json(self) -> dict[str, Any]:
        """Return plain data that ``from_json`` reads back; hours and a holder only if there are any."""
        document = asdict(self)
        absent = (() if self.at else _OF_HOURS) + (() if self.holder else _OF_LOANS)
        return {name: value for name, value in document.items() if name not in absent}

    @property
    def ending(self) -> str:
        """The end in words: "until 2026-11-22 14:00:00 +0100", or "until `dynaplan release`".

        Hours come before it: "at 09:00-17:00 (Europe/Berlin)".
        """
        at = f"at {self.at} ({self.zone})" if self.at else ""
        if self.until_s is None:
            return at or "until `dynaplan release`"
        if at:
            at += " "
        return f"{at}until {self.until or f'{self.until_s:.0f} s after 1970-01-01 UTC'}"


@dataclass(frozen=True)
class RoleHolds:
    """The holds of a deployment, by role; None where a role is not held."""

    prefill: Hold | None = None
    decode: Hold | None = None

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> RoleHolds:
        """Read the form of ``to_json``; other roles are ignored. Raises ValueError, and nothing else."""
        found = {role: object_field(document, role.value, {}) for role in SCALED_ROLES}
        holds = cls()
        for role, hold in found.items():
            holds = holds.replaced(role, Hold.from_json(hold) if hold else None)
        return holds

    @classmethod
    def from_text(cls, text: str) -> RoleHolds:
        """Read the key's value; "" is a key that is missing. Raises ValueError, and nothing else."""
        return cls.from_json(parse_object(text)) if text else cls()

    def to_json(self) -> dict[str, Any]:
        """Return plain data that ``from_json`` reads back: {} without holds."""
        return {role.value: hold.to_json() for role, hold in self.by_role.items()}

    def to_text(self) -> str:
        """Write the holds as the store's key has them: JSON without spaces."""
        return json.dumps(self.to_json(), separators=(",", ":"))

    @property
    def by_role(self) -> dict[Role, Hold]:
        """The holds that there are, prefill first."""
        return {role: hold for role in SCALED_ROLES if (hold := self.of(role))}

    def of(self, role: Role) -> Hold | None:
        return self.prefill if role is Role.PREFILL else self.decode

    def replaced(self, role: Role, hold: Hold | None) -> RoleHolds:
        """Return a copy with this hold of the role; None releases it."""
        return replace(self, prefill=hold) if role is Role.PREFILL else replace(self, decode=hold)

    @property
    def descriptions(self) -> dict[str, Hold]:
        """The holds, by a sentence: "decode was held at 3 by alice until 2026-11-22 14:00:00 +0100"."""
        return {f"{role.value} was {hold}": hold for role, hold in self.by_role.items()}

    def without_expired(self, now_s: float) -> RoleHolds:
        """Return the ones that are not over at ``now_s``, seconds since 1970-01-01 UTC."""
        kept = RoleHolds()
        for role, hold in self.by_role.items():
            left_s = hold.left_s(now_s)
            kept = kept.replaced(role, hold) if left_s is None or left_s > 0 else kept
        return kept

    def without_ended(self, is_alive: Callable[[ProcessIdentity], bool]) -> RoleHolds:
        """Return those that have no holder, and those whose holder is alive."""
        kept = self
        for role, hold in self.by_role.items():
            kept = kept.replaced(role, None) if hold.holder and not is_alive(hold.holder) else kept
        return kept

    def in_force(self, now_s: float, zones: Zones) -> RoleHolds:
        """Return the ones that are neither over nor outside of their hours at that moment."""
        open_ = RoleHolds()
        for role, hold in self.without_expired(now_s).by_role.items():
            open_ = open_.replaced(role, hold) if hold.is_open(now_s, zones) else open_
        return open_

    def beside(self, current: PoolSizes) -> RoleHolds:
        """Return the ones for a deployment of this size: without prefill workers there are none to hold."""
        return self if current.prefill else self.replaced(Role.PREFILL, None)

    def bounded(self, workers: PoolSizes) -> PoolSizes:
        """Return the nearest numbers of workers within the bounds."""
        return PoolSizes(
            self.prefill.bounded(workers.prefill) if self.prefill else workers.prefill,
            self.decode.bounded(workers.decode) if self.decode else workers.decode,
        )


def _workers_field(document: Mapping[str, Any], name: str, otherwise: int | None = None) -> int:
    workers = whole_field(document, name, otherwise)
    if workers > MAX_HELD_WORKERS:
        raise ValueError(f"'{name}' is {workers}: expected at most {MAX_HELD_WORKERS} workers")
    return workers


def _words_field(document: Mapping[str, Any], name: str) -> str:
    text = text_field(document, name, "")
    if len(text) > _MAX_CHARACTERS or not text.isprintable():
        raise ValueError(f"'{name}' is {shown(text)}: expected up to {_MAX_CHARACTERS} printable characters")
    return text


def _parse_hours_field(document: Mapping[str, Any]) -> str:
    text = text_field(document, "at", "")
    return str(parse_hours(text)) if text else ""


RESERVATIONS = "reservations"
"""The name of the reservations' key: ``store_keys.scaling_key``."""

MAX_GPU_INDEX = 1024
"""The largest index of a GPU that can be reserved."""


@dataclass(frozen=True)
class ReservedGpus:
    """The reserved GPUs: index -> its maker and its end."""

    by_gpu: Mapping[int, Hold] = field(default_factory=dict)

    @classmethod
    def from_text(cls, text: str) -> ReservedGpus:
        """Read the key's value; "" is a key that is missing. Raises ValueError, and nothing else."""
        document = parse_object(text) if text else {}
        return cls({_parse_index(name): _parse_hold(name, document[name]) for name in document})

    def to_text(self) -> str:
        """Write them as the store's key has them: JSON without spaces."""
        return json.dumps(self.to_json(), separators=(",", ":"))

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return plain data: {} without any."""
        return {str(index): made.to_json() for index, made in sorted(self.by_gpu.items())}

    @property
    def descriptions(self) -> dict[str, Hold]:
        """The reservations, by a sentence: "GPU 7 was reserved by alice until 2026-11-22 14:00 +0100"."""
        return {f"GPU {index} was {reserved_words(made)}": made for index, made in self.by_gpu.items()}

    def with_gpus(self, made: Mapping[int, Hold]) -> ReservedGpus:
        return ReservedGpus({**self.by_gpu, **made})

    def without_ended(self, is_alive: Callable[[ProcessIdentity], bool]) -> ReservedGpus:
        """Return those that are no loan, and the loans whose holder is alive."""
        held = {index: made.holder for index, made in self.by_gpu.items() if made.holder}
        return self.without(frozenset(index for index, holder in held.items() if not is_alive(holder)))

    def without(self, gpus: frozenset[int]) -> ReservedGpus:
        return ReservedGpus({index: made for index, made in self.by_gpu.items() if index not in gpus})

    def without_expired(self, now_s: float) -> ReservedGpus:
        """Return those whose deadline has not passed, open or not; seconds since 1970-01-01 UTC."""
        left = {index: made.left_s(now_s) for index, made in self.by_gpu.items()}
        over = frozenset(index for index, left_s in left.items() if left_s is not None and left_s <= 0)
        return self.without(over)

    def in_force(self, now_s: float, zones: Zones) -> dict[int, Hold]:
        """Return the GPUs that are reserved at this moment, with the maker and the end."""
        remaining = self.without_expired(now_s).by_gpu
        return {index: made for index, made in sorted(remaining.items()) if made.is_open(now_s, zones)}


def reserved_words(made: Hold) -> str:
    """Return the reason why nothing else gets the GPU: ``reserved by alice until 2026-11-22 14:00 +0100``.

    Of a loan: ``lent to alice for `python train.py` (pid 4711) until it ends``.
    """
    if made.holder:
        ending = f"; it is asked to at {made.until}" if made.until_s else ""
        return f"lent to {made.by} for `{made.command}` (pid {made.holder.pid}) until it ends{ending}"
    maker = f" by {made.by}" if made.by else ""
    return f"reserved{maker} {made.ending}"


def _parse_index(name: str) -> int:
    index = whole_number(name)
    if index is None or not 0 <= index <= MAX_GPU_INDEX:
        raise ValueError(f"{shown(name)}: expected the index of a GPU")
    return index


def _parse_hold(name: str, found: Any) -> Hold:
    if not isinstance(found, dict):
        raise ValueError(f"'{name}' is {shown(found)}: expected a JSON object")
    return Hold.from_json(found)
