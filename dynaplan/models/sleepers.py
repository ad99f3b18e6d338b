"""Which workers sleep, are to sleep, and wake: by the keys ``ASLEEP`` and ``SLEEP``, and by orders."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dynaplan.graph.lifecycle import Worker
from dynaplan.models.model import ModelState
from dynaplan.store.instances import SLEEP_FAILED


@dataclass(frozen=True)
class SleepProgress:
    """What a registered worker does that sleeps, falls asleep, wakes or has been woken, and since when.

    ``failure`` is what went wrong.
    """

    state: ModelState
    since_s: float
    level: str = ""
    failure: str = ""


ASSUMED_WAKING_S = 30.0
"""For how long a sleeper without an order to sleep is taken to wake: another fleet plugin asked it to."""


class Sleepers:
    """Follows which instances sleep, are to sleep, and wake: by the store's keys, and by orders given here.

    ``ASLEEP`` and ``SLEEP`` have a watch each, so the first may be seen before the order that it follows.
    """

    def __init__(self) -> None:
        self._unseen_sleep_orders: dict[int, str] = {}
        self._without_order_s: dict[int, float] = {}
        self._since_s: dict[tuple[int, ModelState], float] = {}
        self._progress: dict[int, SleepProgress] = {}
        self._waking: set[int] = set()
        self._asleep: frozenset[int] = frozenset()

    def follow(self, asleep: Mapping[int, str], to_sleep: Mapping[int, str], now_s: float) -> None:
        """Take over the values of the keys ``ASLEEP`` and ``SLEEP``, by instance."""
        self._waking &= asleep.keys()
        for seen in to_sleep.keys() & self._unseen_sleep_orders.keys():
            del self._unseen_sleep_orders[seen]
        unseen = {each: level for each, level in self._unseen_sleep_orders.items() if each in asleep}
        to_sleep = {**to_sleep, **unseen}
        without_order = asleep.keys() - to_sleep.keys()
        self._without_order_s = {each: self._without_order_s.get(each, now_s) for each in without_order}
        woken = self._asleep - asleep.keys()
        self._asleep = frozenset(asleep)
        awake = {
            each: progress for each, progress in self._progress.items() if progress.state is ModelState.READY
        }
        self._progress = awake | {each: SleepProgress(ModelState.READY, now_s) for each in woken}
        for instance_id in asleep.keys() | to_sleep.keys():
            reason, order = asleep.get(instance_id, ""), to_sleep.get(instance_id, "")
            state = ModelState.ASLEEP if instance_id in asleep else ModelState.DRAINING
            failure = f"it cannot be woken: {reason}" if reason else ""
            if order.startswith(SLEEP_FAILED):
                state, failure, order = ModelState.READY, order.removeprefix(SLEEP_FAILED), ""
            elif self._is_waking(instance_id, now_s) and not failure:
                state = ModelState.LOADING
            since_s = self._since_s.setdefault((instance_id, state), now_s)
            self._progress[instance_id] = SleepProgress(state, since_s, order, failure)
        current = {(instance_id, progress.state) for instance_id, progress in self._progress.items()}
        self._since_s = {key: since_s for key, since_s in self._since_s.items() if key in current}

    def _is_waking(self, instance_id: int, now_s: float) -> bool:
        since_s = self._without_order_s.get(instance_id, -math.inf)
        return instance_id in self._waking or now_s - since_s < ASSUMED_WAKING_S

    def of(self, worker: Worker | None) -> SleepProgress | None:
        return self._progress.get(worker.instance_id) if worker and worker.instance_id else None

    def note_sleep_order(self, instance_id: int, level: str) -> None:
        """Note that the instance was asked to sleep at this level."""
        self._waking.discard(instance_id)
        self._unseen_sleep_orders[instance_id] = level

    def note_wake_order(self, instance_id: int) -> None:
        """Note that the instance was asked to wake; an order to sleep that was not seen yet is void."""
        self._unseen_sleep_orders.pop(instance_id, None)
        self._waking.add(instance_id)
