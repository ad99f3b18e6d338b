"""The events among a planner's recorded decisions, for the event hook of the fleet plugin."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dynaplan.contract.hook_events import SCALED, TARGET_MISSED, HookEvent
from dynaplan.planner.recorders.decision_log import record_time_s
from dynaplan.planner.rules.explain import is_change, summarize


class RecordedDecisionEvents:
    """The events in a planner's records: decisions that scaled, and targets whose error budget is used up.

    ``records`` returns the planner's last records, the oldest first. What the first poll finds is no event.
    """

    def __init__(self, records: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        self._records = records
        self._last_s: float | None = None

    def poll(self) -> Iterator[HookEvent]:
        """Yield the events of the records that are newer than those of the last poll."""
        records = list(self._records())
        before_s = self._last_s
        self._last_s = max([before_s or -math.inf, *map(record_time_s, records)])
        if before_s is None:
            return
        for record in records:
            if record_time_s(record) > before_s:
                yield from _events_of(record)


def _events_of(record: Mapping[str, Any]) -> Iterator[HookEvent]:
    if is_change(record) and not record.get("settings", {}).get("no-operation"):
        yield HookEvent(SCALED, summarize(record))
    before, after = (_budget(record, state) for state in ("state", "next_state"))
    for name in ("ttft", "itl"):
        key = f"{name}_requests"
        if after.get(key, 0.0) < 0 <= before.get(key, 0.0):
            missed = -after[key]
            said = f"{missed:.0f} more requests missed it than its percentile allows"
            yield HookEvent(TARGET_MISSED, f"the target of {name.upper()}: {said}")


def _budget(record: Mapping[str, Any], state: str) -> Mapping[str, float]:
    document = record.get(state)
    found = document.get("error_budget") if isinstance(document, dict) else None
    return found if isinstance(found, dict) else {}
