"""What a planner remembers of the options that it changes: pure, and part of its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dynaplan.contract.option_changes import OptionChange
from dynaplan.contract.traffic import Traffic

JUDGED_PARTS = 5
"""The parts in which the traffic that a change is judged by is counted: they tell how misses scatter."""


class ServedPart(NamedTuple):
    """A stretch of traffic: seconds, requests, those that missed, and the tokens of prompts and answers."""

    length_s: float
    requests: float
    missed: float
    tokens: float

    def plus(self, other: ServedPart) -> ServedPart:
        return ServedPart(*(round(one + more, 1) for one, more in zip(self, other, strict=True)))

    @property
    def in_time(self) -> float:
        """The part of the requests that met both targets; 1 without any."""
        return max(0.0, 1 - self.missed / self.requests) if self.requests else 1.0


NOTHING_SERVED = ServedPart(0.0, 0.0, 0.0, 0.0)


def total(parts: Sequence[ServedPart]) -> ServedPart:
    """Return all parts as one."""
    found = NOTHING_SERVED
    for each in parts:
        found = found.plus(each)
    return found


class BarredValue(NamedTuple):
    """A value that an option does not get again until then, monotonic seconds."""

    component: str
    option: str
    value: int
    until_s: float


@dataclass(frozen=True)
class OptionMemory:
    """The last change of an option, and how the traffic went before it and since.

    ``applied_at_s`` is the moment since which all workers have it, None until then. ``is_settled``: it stays,
    was taken back, or was never made. ``recent_parts`` are the newest parts of the traffic, the last one
    growing; ``served_before`` those before the change, as one.
    """

    change: OptionChange | None = None
    applied_at_s: float | None = None
    is_settled: bool = False
    served_before: ServedPart = NOTHING_SERVED
    recent_parts: tuple[ServedPart, ...] = ()
    barred: tuple[BarredValue, ...] = ()

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> OptionMemory:
        """Read the mapping that ``dataclasses.asdict`` makes; KeyError or TypeError for another."""
        change = document.get("change")
        parts = {
            "change": OptionChange(**change) if change else None,
            "served_before": ServedPart(*document.get("served_before", NOTHING_SERVED)),
            "recent_parts": tuple(ServedPart(*each) for each in document.get("recent_parts", ())),
            "barred": tuple(BarredValue(*each) for each in document.get("barred", ())),
        }
        return cls(**{**document, **parts})

    def with_traffic(self, traffic: Traffic | None, within_s: float) -> OptionMemory:
        """Return the memory with the traffic of one more interval; it keeps that of ``within_s`` seconds.

        One of which nobody counted the misses is left out.
        """
        if traffic is None or traffic.requests is None or not traffic.over_ttft or not traffic.over_itl:
            return self
        tokens = traffic.requests * ((traffic.isl_tokens or 0.0) + (traffic.osl_tokens or 0.0))
        missed = max(traffic.over_ttft[0][1], traffic.over_itl[0][1])
        newest, served = (
            ServedPart(traffic.interval_s, traffic.requests, missed, tokens),
            [*self.recent_parts],
        )
        if served and served[-1].length_s < within_s / JUDGED_PARTS:
            newest = served.pop().plus(newest)
        served.append(newest)
        while total(served[1:]).length_s >= within_s:
            del served[0]
        return replace(self, recent_parts=tuple(served))

    def moved(self, by_s: float) -> OptionMemory:
        """Return the memory by a clock that shows so much more; what tells the change apart stays."""
        barred = tuple(each._replace(until_s=each.until_s + by_s) for each in self.barred)
        return replace(
            self, applied_at_s=None if self.applied_at_s is None else self.applied_at_s + by_s, barred=barred
        )

    def bars(self, component: str, option: str, value: int, at_s: float) -> bool:
        """Tell whether the option may not have that value now."""
        return any(each[:3] == (component, option, value) and at_s < each.until_s for each in self.barred)

    def with_barred(self, value: BarredValue, at_s: float) -> OptionMemory:
        """Return the memory with one more barred value, without those that are barred no more."""
        kept = (each for each in self.barred if at_s < each.until_s and each[:3] != value[:3])
        return replace(self, barred=(*kept, value))
