"""Why no worker of a service answers: all crashed and wait for a restart, or none can ever start.

The fleet plugin publishes it, and frontends report it to their clients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dynaplan.graph.lifecycle import COUNTS, Worker, WorkerState
from dynaplan.util.documents import object_field, parse_object, text_field, whole_field

ABSENT = "absent"
"""The field of the fleet's document: component -> absence."""

NEVER_ASK_AGAIN_S = 60
"""Seconds after which a client may ask again where only a person can help."""


@dataclass(frozen=True)
class Absence:
    """The absence of every worker of one service.

    ``why`` says it in words. ``retry_unix_s`` is the time at which the next start begins, by the wall clock
    in seconds since 1970: 0 when one has begun, None when none will without a person.
    """

    why: str
    retry_unix_s: int | None = 0

    def retry_s(self, unix_time_s: float) -> float:
        """Return the seconds until a worker is started; infinite when only a person can have one started."""
        return math.inf if self.retry_unix_s is None else max(0.0, self.retry_unix_s - unix_time_s)

    def retry_after_s(self, unix_time_s: float) -> int:
        """Return the whole seconds after which a client may ask again, at least 1.

        Many when only a person helps.
        """
        delay_s = self.retry_s(unix_time_s)
        return NEVER_ASK_AGAIN_S if math.isinf(delay_s) else math.ceil(delay_s) + 1

    def message(self, unix_time_s: float) -> str:
        """Return the error text for a client: why no worker serves, and when one may."""
        if self.retry_unix_s is None:
            return self.why
        delay_s = self.retry_s(unix_time_s)
        when = f"is started again in {math.ceil(delay_s)} s" if delay_s else "is being started again"
        return f"{self.why}; it {when}."

    def to_json(self) -> dict[str, Any]:
        return {"why": self.why} | ({} if self.retry_unix_s is None else {"retry_unix_s": self.retry_unix_s})


def read_absence(fleet: str, component: str) -> Absence | None:
    """Read a component's absence in the published fleet; None when there is none, or it cannot be read."""
    try:
        found = object_field(_absent(fleet), component)
        retry_unix_s = whole_field(found, "retry_unix_s") if "retry_unix_s" in found else None
        return Absence(text_field(found, "why"), retry_unix_s)
    except ValueError:
        return None


@lru_cache(maxsize=1)
def _absent(fleet: str) -> Mapping[str, Any]:
    """Return the absences in the published fleet, by component; raises ValueError.

    Those of the last text are kept, for it is read again with each request.
    """
    return object_field(parse_object(fleet), ABSENT, {})


CAUSE = "can never start: "
"""The words before the cause in the line that a worker writes last into its log."""


def unstartable_services(workers: Iterable[Worker]) -> dict[str, Worker]:
    """Return the services of which no worker can ever start, each with a worker: component -> worker."""
    counted = [worker for worker in workers if worker.state in COUNTS]
    return {
        worker.component: worker
        for worker in counted
        if all(_is_unstartable(each) for each in counted if each.component == worker.component)
    }


def cause(worker: Worker) -> str:
    """Return why a failed worker cannot start, in one line: the last that its log says, else its exit."""
    lines = [line.strip() for line in worker.reason.splitlines()] or ["no reason is known"]
    told = next((line.partition(CAUSE)[2] for line in reversed(lines) if CAUSE in line), lines[0])
    # An engine's own words follow; the last of them are its conclusion.
    return f"{told.partition('; its last lines')[0]}: {lines[-1]}" if told.endswith(":") else told


def absences(workers: Iterable[Worker], now_s: float, unix_time_s: float) -> dict[str, Absence]:
    """Return the services of which no worker answers because of crashes, and why: component -> absence.

    Both times are now, on the workers' clock and by the wall clock, in seconds.
    """
    counted = [worker for worker in workers if worker.state in COUNTS]
    lost = unstartable_services(counted)
    found = {
        component: Absence(
            f"{component} cannot start: {cause(worker)}; see `dynaplan logs {worker.name}`", None
        )
        for component, worker in lost.items()
    }
    for component in {worker.component for worker in counted} - lost.keys():
        own = [worker for worker in counted if worker.component == component]
        if all(map(_is_crashed, own)):
            found[component] = _recovering(min(own, key=_restart_s), now_s, unix_time_s)
    return found


def absence_fields(workers: Iterable[Worker], now_s: float, unix_time_s: float) -> dict[str, Any]:
    """Return the part of the fleet's published document that says why requests cannot be answered."""
    found = absences(workers, now_s, unix_time_s)
    return {ABSENT: {component: absence.to_json() for component, absence in found.items()}}


def _recovering(worker: Worker, now_s: float, unix_time_s: float) -> Absence:
    reason = worker.reason.partition("\n")[0]
    why = f"No {worker.component} can answer: {worker.name} has ended ({reason})"
    restart_s = _restart_s(worker)
    return Absence(why, math.ceil(unix_time_s + restart_s - now_s) if restart_s > now_s else 0)


def _is_crashed(worker: Worker) -> bool:
    if worker.state is WorkerState.STARTING:
        return bool(worker.restarts_s or worker.failures) and not worker.url
    return worker.state in (WorkerState.BACKOFF, WorkerState.FAILED)


def _restart_s(worker: Worker) -> float:
    """Return the time of the worker's next start on the workers' clock; 0 when it has begun."""
    if worker.state is WorkerState.STARTING:
        return 0.0
    return math.inf if _is_unstartable(worker) else worker.retry_at_s


def _is_unstartable(worker: Worker) -> bool:
    return worker.state is WorkerState.FAILED and not worker.retry_at_s
