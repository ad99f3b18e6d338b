"""Which absent model is wanted since when, which is loaded next, and which loaded one gives way.

A model that is not there is *in demand* from the arrival of the first request that waits for it (or from when
its owner asked for it). The demand lasts while anybody waits, also when the first one has given up; clients
that are refused and ask again within ``DEMAND_PAUSE_S`` go on with it. The model takes its turn in one of
three ways, and which one is open to it depends on who would have to leave:

1. Nobody, or only models with nothing to do, or further workers of a model (``replicas``): at once.
2. A model that answers or has requests of its own, or loads for longer than its ``load_timeout_s``: when the
   demand is *overdue*. Until then the loaded model serves everybody who asks for it, so that requests for one
   model are served together; from then on it admits nobody, finishes what it answers, and leaves.
3. A model that is pinned: never. One within its minimum stay, one that loads for somebody, and one that has
   not yet admitted those who waited for its load: when that is over.

A demand is overdue ``max_swap_wait_s`` after it began. Demands are served by that deadline, the earliest
first. Each deadline is fixed when its demand begins, and the wait that it adds to the arrival is bounded, so
that finitely many demands come before any other and none starves.

So the first in this order waits at most ::

    max_swap_wait_s + longest answer + its load

where what must leave has no minimum stay left and has admitted those who waited for it. Each demand that is
ahead of it for the same memory adds its own load, the remainder of its minimum stay, and its longest answer:
as soon as those who waited for it have been admitted, its turn is over, because the next one is overdue.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import inf

from dynaplan.models.model import ModelPolicy, ModelState, ModelStatus
from dynaplan.models.rules.memory import load_s

SWAP_WAIT_LOADS = 3.0
"""The default of ``max_swap_wait_s`` in load times of the model that waits: a swap is then at most about a
quarter of a turn, however many take turns."""


DEMAND_PAUSE_S = 60.0
"""A demand that nobody has had for longer than this is over: who comes then begins another."""


def max_swap_wait_s(settings: ModelPolicy, status: ModelStatus) -> float:
    """Return for how long the model's requests wait at most for the turn of another model to end.

    That leaves the time of a load before they are refused (``load_timeout_s``): else they would wait in vain.
    """
    load = load_s(settings, status)
    wanted_s = settings.max_swap_wait_s
    if wanted_s is None:
        wanted_s = SWAP_WAIT_LOADS * load / settings.priority
    return min(wanted_s, max(0.0, settings.load_timeout_s - load))


def demand_since_s(settings: ModelPolicy, status: ModelStatus) -> float | None:
    """Return since when somebody wants a model that is not there; None when nobody does."""
    begun = []
    if status.waiting:
        begun.append(min(status.oldest_arrival_s, status.waiting_since_s))
    if status.load_asked_s is not None:
        begun.append(status.load_asked_s)
    if settings.is_pinned and not status.unload_asked:
        begun.append(status.since_s)
    return min(begun, default=None)


def deadline_s(settings: ModelPolicy, status: ModelStatus) -> float:
    """Return when the demand for the model is overdue; infinity when nobody wants it."""
    since = demand_since_s(settings, status)
    return inf if since is None else since + max_swap_wait_s(settings, status)


class Leave(IntEnum):
    """When a loaded model may leave for another."""

    AT_ONCE = 0
    FOR_OVERDUE = 1
    """For a demand that is overdue."""
    NOT_YET = 2
    """Not even for an overdue one, for the moment."""
    NEVER = 3


@dataclass(frozen=True)
class Tenure:
    """When a loaded model may be unloaded for another, and why not sooner.

    ``until_s`` is when that reason ends; infinity where it is not known.
    """

    leave: Leave
    why: str = ""
    until_s: float = inf


def tenure_of(settings: ModelPolicy, status: ModelStatus, now_s: float) -> Tenure:
    """Return when the loaded model may leave for another; the cases are those of the module's head."""
    if status.is_prefill:
        return Tenure(Leave.AT_ONCE, f"{status.replica_of} computes its prompts without it")
    if status.replica_of:
        return Tenure(Leave.AT_ONCE, f"other workers of {status.replica_of} go on")
    if settings.is_pinned:
        return Tenure(Leave.NEVER, "is pinned")
    if status.state is ModelState.LOADING:
        if not status.waiting and status.load_asked_s is None:
            return Tenure(Leave.AT_ONCE, "is loading, and nobody waits for it")
        if now_s >= status.since_s + settings.load_timeout_s:
            return Tenure(Leave.FOR_OVERDUE, f"has been loading for {seconds(now_s - status.since_s)}")
        return Tenure(Leave.NOT_YET, f"is loading for {count(status.waiting)}")
    stays_until_s = status.since_s + settings.min_stay_s
    if status.state is ModelState.READY and now_s < stays_until_s:
        return Tenure(
            Leave.NOT_YET, f"stays for another {stays_until_s - now_s:.0f} s (min-stay)", stays_until_s
        )
    if status.state is ModelState.READY and status.waiting and status.oldest_arrival_s <= status.since_s:
        return Tenure(Leave.NOT_YET, f"admits the {count(status.waiting)} that waited for its load")
    if status.in_flight or status.waiting:
        return Tenure(Leave.FOR_OVERDUE, f"answers {count(status.in_flight or status.waiting)}")
    return Tenure(Leave.AT_ONCE, "has nothing to do")


def count(number: int) -> str:
    """Return a number of requests in words."""
    return "1 request" if number == 1 else f"{number or 'no'} requests"


def seconds(duration_s: float) -> str:
    """Return a duration in words: ``0.4 s``, ``41 s``."""
    return f"{duration_s:.1f} s" if 0 < duration_s < 9.95 else f"{duration_s:.0f} s"
