"""Events: their subjects, and one event as its subscriber receives it.

A subject is ``{namespace}.{component}.{event}``, as in ``vllm-agg.backend.kv_cache_update``. A pattern is a
subject in which ``*`` stands for one part, and ``>`` at the end for one or more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dynaplan.util.errors import ConfigError

PARTS = 3
_PART = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Subject:
    """The subject of an event of a component; raises ConfigError for a part that NATS would not take."""

    namespace: str
    component: str
    event: str

    def __post_init__(self) -> None:
        for part in (self.namespace, self.component, self.event):
            if not _PART.fullmatch(part):
                raise ConfigError(
                    f"{part!r} cannot be a part of an event's subject",
                    hint="Expected letters, digits, '-' and '_'.",
                )

    def __str__(self) -> str:
        return f"{self.namespace}.{self.component}.{self.event}"

    @classmethod
    def parse(cls, text: str) -> Subject | None:
        """Read a subject; None for any other text."""
        parts = text.split(".")
        if len(parts) != PARTS or not all(map(_PART.fullmatch, parts)):
            return None
        return cls(*parts)


@dataclass(frozen=True)
class Event:
    """One event.

    ``publisher`` and ``sequence`` say which event of which publisher it is, the first being 0; a message that
    another program published without them has publisher 0. ``position`` is its number among the events that
    are kept, from which a later subscription can begin; 0 where nothing is kept. ``missed`` events of
    this publisher came before it and not to this subscription: it began later, or they were lost.
    ``receipt`` is where a group's event is acknowledged.
    """

    subject: str
    payload: bytes
    publisher: int = 0
    sequence: int = 0
    position: int = 0
    missed: int = 0
    receipt: str = ""


@dataclass(frozen=True)
class Start:
    """The first event of a subscription: the next one, unless a position or a time (Unix, seconds) is given.

    Events before now can be had only where they are kept.
    """

    position: int | None = None
    unix_s: float | None = None

    @property
    def is_now(self) -> bool:
        """True when the subscription begins with the next event."""
        return self.position is None and self.unix_s is None


NOW = Start()
KEPT = Start(position=0)
"""The first event that is still kept."""


@dataclass
class EventCounts:
    """The numbers of events that one process has published, dropped, received and missed."""

    published: int = 0
    dropped: int = 0
    received: int = 0
    missed: int = 0
    unreadable: int = 0


def matches(pattern: str, subject: str) -> bool:
    """Tell if a subject matches a pattern: ``*`` stands for one part, ``>`` at the end for one or more."""
    wanted, parts = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        return len(parts) >= len(wanted) and matches(
            ".".join(wanted[:-1]), ".".join(parts[: len(wanted) - 1])
        )
    return len(wanted) == len(parts) and all(
        want in ("*", part) for want, part in zip(wanted, parts, strict=True)
    )
