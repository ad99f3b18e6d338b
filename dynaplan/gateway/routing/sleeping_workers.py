"""The workers whose engines sleep, as they report it, or are about to, and how a router has one woken."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from dynaplan.gateway import timing
from dynaplan.store.instances import ASLEEP, SLEEP, WAKE, Instance
from dynaplan.store.model import Transaction
from dynaplan.store.port import Store
from dynaplan.util.errors import PermanentError, StoreUnavailable
from dynaplan.util.tasks import BackgroundTasks

log = logging.getLogger(__name__)


class EngineAsleep(Exception):
    """The engine sleeps, fell asleep over a request, or stands still: no fault of the request, no death."""


class WhileAwake:
    """A ``with`` block that ends with EngineAsleep when its engine falls asleep, or stalls.

    It is one of ``waits`` until then, or until it stops watching.
    """

    __slots__ = ("_broken_off", "_task", "_waits", "instance_id")

    def __init__(self, instance_id: int, waits: set[WhileAwake]) -> None:
        self.instance_id = instance_id
        self._waits = waits
        self._task: asyncio.Task[Any] | None = None
        self._broken_off = ""

    def __enter__(self) -> WhileAwake:
        self._task = asyncio.current_task()
        self._waits.add(self)
        return self

    def stop_watching(self) -> None:
        """Have the rest of the block go on, whatever the engine does."""
        self._waits.discard(self)

    def break_off(self, reason: str) -> None:
        """Cancel the task that runs the block; the block then raises EngineAsleep with the reason."""
        assert self._task
        self._broken_off = reason
        self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._waits.discard(self)
        if self._broken_off and self._task:
            # As asyncio.timeout does: a cancellation by somebody else, of a client that left, goes on.
            is_only_ours = self._task.uncancel() == 0
            if is_only_ours and kind is asyncio.CancelledError:
                raise EngineAsleep(self._broken_off) from None


class SleepingWorkers:
    """The sleeping instances of a namespace; ``ids`` are theirs, and those of instances that are to sleep."""

    def __init__(
        self,
        store: Store,
        namespace: str,
        background: BackgroundTasks,
        now_s: Callable[[], float],
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._background = background
        self._now_s = now_s
        self._reasons: Mapping[int, str] = {}
        self._to_sleep: frozenset[int] = frozenset()
        self.ids: frozenset[int] = frozenset()
        self._asked_s: dict[int, float] = {}
        self._callbacks: list[Callable[[frozenset[int]], Any]] = []
        self._waits: set[WhileAwake] = set()

    @property
    def prefix(self) -> str:
        """The prefix of the keys to follow."""
        return ASLEEP.prefix(self._namespace)

    def follow(self, keys: Mapping[str, str]) -> None:
        """Take over the keys under ``prefix``, as they are now."""
        named = ((ASLEEP.instance(self._namespace, key), reason) for key, reason in keys.items())
        before = self._reasons
        self._reasons = {instance_id: reason for instance_id, reason in named if instance_id}
        self.ids = self._to_sleep.union(self._reasons)
        self._asked_s = {each: s for each, s in self._asked_s.items() if each in self._reasons}
        fell_asleep = frozenset(self._reasons.keys() - before.keys())
        self.break_off(fell_asleep, "its engine fell asleep")
        for callback in self._callbacks:
            callback(fell_asleep)

    def break_off(self, instance_ids: frozenset[int], reason: str) -> None:
        """Break off every ``while_awake`` block of these instances."""
        broken_off = {wait for wait in self._waits if wait.instance_id in instance_ids}
        self._waits.difference_update(broken_off)
        for wait in broken_off:
            wait.break_off(reason)

    def follow_orders(self, keys: Mapping[str, str]) -> None:
        """Take over the keys of ``SLEEP``: these instances finish what they answer, and get nothing more."""
        self._to_sleep = SLEEP.instances(self._namespace, keys)
        self.ids = self._to_sleep.union(self._reasons)
        for callback in self._callbacks:
            callback(frozenset())

    def is_to_sleep(self, instance_id: int) -> bool:
        """Return whether it is known here that the instance is to sleep: it gets nothing more."""
        return instance_id in self._to_sleep

    def on_change(self, callback: Callable[[frozenset[int]], Any]) -> None:
        """Call this after each change, with the instance ids that have fallen asleep."""
        self._callbacks.append(callback)

    def __contains__(self, instance: Instance) -> bool:
        return instance.instance_id in self.ids

    def while_awake(self, instance: Instance) -> WhileAwake:
        """Return a context that ends with EngineAsleep when the instance's engine falls asleep, or stalls.

        Raises EngineAsleep at once for an instance that sleeps already.
        """
        if instance.instance_id in self.ids:
            raise EngineAsleep("its engine sleeps")
        return WhileAwake(instance.instance_id, self._waits)

    def all_asleep(self, instances: Collection[Instance]) -> bool:
        """Return whether all of these instances sleep, and there are any."""
        return bool(instances) and all(each.instance_id in self._reasons for each in instances)

    def wake_one(self, instances: Iterable[Instance]) -> str:
        """Ask for one of these instances to be woken, the same one for every caller; one must be asleep.

        Return why its engine cannot wake, as far as is known; empty when it can.
        """
        known = [each for each in instances if each.instance_id in self._reasons]
        first = min(known, key=lambda each: (bool(self._reasons[each.instance_id]), each.instance_id))
        now_s = self._now_s()
        if now_s >= self._asked_s.get(first.instance_id, float("-inf")) + timing.WAKE_RETRY_S:
            self._asked_s[first.instance_id] = now_s
            self._background.spawn(request_wake(self._store, self._namespace, first.instance_id))
        return self._reasons[first.instance_id]


async def request_wake(store: Store, namespace: str, instance_id: int) -> bool:
    """Ask the instance's worker to wake its engine; False when the store does not answer."""
    try:
        lease = await store.grant(timing.WAKE_REQUEST_TTL_S)
        key = WAKE.key(namespace, instance_id)
        return await store.commit(Transaction(puts={key: ""}, lease=lease))
    except (StoreUnavailable, PermanentError) as error:
        log.warning("a sleeping worker cannot be asked to wake: %s", error)
        return False
