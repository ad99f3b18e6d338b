"""Which workers sleep, are to sleep, and wake: by the keys ``ASLEEP`` and ``SLEEP``, and by orders."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dynaplan.graph.lifecycle import Worker
from dynaplan.models.model import ModelState
from dynaplan.store.instances import SLEEP_FAILED


@dataclass(frozen=True)
class SleepProgress:
    """What a registered worker does: sleep, fall asleep, wake, or serve again, since when and how deeply.

    ``failure`` says why it could not be put to sleep, or woken; empty where nothing is wrong.
    """

    state: ModelState
    since_s: float
    level: str = ""
    failure: str = ""


ASSUMED_WAKING_S = 30.0
"""For how long a sleeper without an order to sleep is taken to wake: another fleet plugin asked it to."""


@dataclass(frozen=True)
class Sleepers:
    """Which instances sleep, are to sleep, and wake: by the store's keys, and by orders given here.

    ``ASLEEP`` and ``SLEEP`` have a watch each, so the first may be seen before the order that it follows.
    """

    progress: Mapping[int, SleepProgress] = field(default_factory=dict)
    _asleep: frozenset[int] = frozenset()
    _waking: frozenset[int] = frozenset()
    _unseen_sleep_orders: Mapping[int, str] = field(default_factory=dict)
    _without_order_s: Mapping[int, float] = field(default_factory=dict)

    def follow(self, asleep: Mapping[int, str], to_sleep: Mapping[int, str], now_s: float) -> Sleepers:
        """Return the sleepers by the present values of the keys ``ASLEEP`` and ``SLEEP``, by instance."""
        unseen = {each: level for each, level in self._unseen_sleep_orders.items() if each not in to_sleep}
        to_sleep = {**to_sleep, **{each: level for each, level in unseen.items() if each in asleep}}
        followed = Sleepers(
            {
                **{each: known for each, known in self.progress.items() if known.state is ModelState.READY},
                **{each: SleepProgress(ModelState.READY, now_s) for each in self._asleep - asleep.keys()},
            },
            frozenset(asleep),
            self._waking & asleep.keys(),
            unseen,
            {each: self._without_order_s.get(each, now_s) for each in asleep.keys() - to_sleep.keys()},
        )
        known = {each: followed._follow_one(each, asleep, to_sleep, now_s) for each in {**asleep, **to_sleep}}
        for each, progress in known.items():
            before = self.progress.get(each)
            if before and before.state is progress.state:
                known[each] = replace(progress, since_s=before.since_s)
        return replace(followed, progress={**followed.progress, **known})

    def _follow_one(
        self, instance_id: int, asleep: Mapping[int, str], to_sleep: Mapping[int, str], now_s: float
    ) -> SleepProgress:
        reason, order = asleep.get(instance_id, ""), to_sleep.get(instance_id, "")
        if order.startswith(SLEEP_FAILED):
            return SleepProgress(ModelState.READY, now_s, failure=order.removeprefix(SLEEP_FAILED))
        state = ModelState.ASLEEP if instance_id in asleep else ModelState.DRAINING
        if reason:
            return SleepProgress(state, now_s, order, f"it cannot be woken: {reason}")
        without_order_s = self._without_order_s.get(instance_id, -math.inf)
        if instance_id in self._waking or now_s - without_order_s < ASSUMED_WAKING_S:
            state = ModelState.LOADING
        return SleepProgress(state, now_s, order)

    def of(self, worker: Worker | None) -> SleepProgress | None:
        return self.progress.get(worker.instance_id) if worker and worker.instance_id else None

    def with_sleep_order(self, instance_id: int, level: str) -> Sleepers:
        """Return the sleepers after the instance was asked to sleep at this level."""
        unseen = {**self._unseen_sleep_orders, instance_id: level}
        return replace(self, _waking=self._waking - {instance_id}, _unseen_sleep_orders=unseen)

    def with_wake_order(self, instance_id: int) -> Sleepers:
        """Return the sleepers after the instance was asked to wake; an unseen order to sleep is void."""
        unseen = {each: level for each, level in self._unseen_sleep_orders.items() if each != instance_id}
        return replace(self, _waking=self._waking | {instance_id}, _unseen_sleep_orders=unseen)
