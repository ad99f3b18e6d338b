"""The fleet plugin's link to the key-value store: it reads by watch and writes in the background.

Nothing here holds the plugin up: the store may be away for any time.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from dynaplan.contract.model_keys import MODEL_DEMAND, MODEL_ORDERS, MODEL_WORKERS, ModelDemand, demand_in
from dynaplan.contract.option_changes import OPTION_CHANGE
from dynaplan.contract.store_keys import (
    DesiredCounts,
    by_name,
    first_to_leave,
    fleet_key,
    former_extensions,
    live_settings_prefix,
    scaling_key,
    scaling_prefix,
)
from dynaplan.fleet.rules.lost_keys import PersistedKeys
from dynaplan.fleet.unreadable import unreadable
from dynaplan.process import process_table
from dynaplan.store.discovery import Discovery
from dynaplan.store.instances import ASLEEP, SLEEP, WAKE, InstanceKeys
from dynaplan.store.model import KeyValue, Transaction
from dynaplan.store.port import Store
from dynaplan.store.prefix_watcher import PrefixWatcher, value_string
from dynaplan.util.errors import PermanentError, TemporaryError
from dynaplan.util.tasks import BackgroundTasks

log = logging.getLogger(__name__)

STORE_TIMEOUT_S = 2.0
RETRY_S = 0.5
REVOKE_FOR_S = 30.0
"""Longest time of trying: a lease that nobody keeps alive has expired by itself then."""


class StoreLink:
    """Follows the desired counts and the registrations; writes acknowledgements and the fleet.

    ``wake`` is set after every change of what is known.
    """

    def __init__(self, store: Store, namespace: str, wake: asyncio.Event) -> None:
        self._store = store
        self._namespace = namespace
        self._wake = wake
        self._counts = PrefixWatcher(store, scaling_prefix(namespace), value_string)
        self._live = PrefixWatcher(store, live_settings_prefix(namespace), value_string)
        self._asleep = PrefixWatcher(store, ASLEEP.prefix(namespace), value_string)
        self._to_sleep = PrefixWatcher(store, SLEEP.prefix(namespace), value_string)
        self._demand = PrefixWatcher(store, MODEL_DEMAND.prefix(namespace), value_string)
        self._named: Mapping[str, str] = {}
        self._discovery = Discovery(store, namespace, process_table.network())
        self._is_following = False
        self._wanted: dict[str, str] = {}
        self._written: dict[str, str] = {}
        self._has_work = asyncio.Event()
        self._tasks = BackgroundTasks()
        self._is_deciding = False
        self._revoking: set[int] = set()
        self.unanswered: set[int] = set()
        """The leases whose revocation the store has not answered yet."""

    def start(self) -> None:
        self._discovery.on_change(self._wake.set)
        self._counts.on_snapshot(self._write_again)
        for watcher in (self._counts, self._live):
            watcher.on_change(self._name_unreadable)
        self._counts.on_change(self._move_former_extensions)
        self._asleep.on_change(self._wake.set)
        self._tasks.spawn(self._follow_registrations(), "registrations")
        self._tasks.spawn(self._counts.run(), "desired counts")
        self._tasks.spawn(self._asleep.run(), "sleeping engines")
        self._tasks.spawn(self._live.run(), "live settings")
        self._tasks.spawn(self._write(), "store writer")

    def follow_demand(self) -> None:
        """Follow what frontends say of requests for models that are loaded on request."""
        self._demand.on_change(self._wake.set)
        self._tasks.spawn(self._demand.run(), "demand for models")
        self._to_sleep.on_change(self._wake.set)
        self._tasks.spawn(self._to_sleep.run(), "orders to sleep")

    @property
    def model_demand(self) -> dict[str, ModelDemand] | None:
        """The demand for models, by name; None until the store has answered."""
        watched = self._demand, self._asleep, self._to_sleep
        if self._keys is None or not all(each.has_synced for each in watched):
            return None
        return demand_in(self._demand.current.values())

    @property
    def model_orders(self) -> str | None:
        """What persons have asked for models, as it is in the store; None until that has answered."""
        keys = self._keys
        return None if keys is None else keys.get(scaling_key(self._namespace, MODEL_ORDERS), "")

    @property
    def model_workers(self) -> str | None:
        """What planners of models want, as it is in the store; None until that has answered."""
        keys = self._keys
        return None if keys is None else keys.get(scaling_key(self._namespace, MODEL_WORKERS), "")

    @property
    def option_change(self) -> str:
        """The last change of an engine's option that was asked for, as text; empty until one is known."""
        return (self._keys or {}).get(scaling_key(self._namespace, OPTION_CHANGE), "")

    @property
    def counts(self) -> DesiredCounts | None:
        """The decision in force; None until the store has answered."""
        keys = self._keys
        return None if keys is None else DesiredCounts.from_keys(self._namespace, keys)

    @property
    def leave_first(self) -> str:
        """The worker that leaves before any other by the decision in force; empty when none is named."""
        counts = self.counts
        return first_to_leave(self._namespace, self._keys or {}, counts.decision_id) if counts else ""

    @property
    def asleep(self) -> frozenset[int]:
        """The instances whose engines sleep, as their workers say."""
        return ASLEEP.instances(self._namespace, self._asleep.current)

    @property
    def sleep_reasons(self) -> dict[int, str]:
        """The sleeping instances, and why each cannot be woken, or empty."""
        return self._by_instance(ASLEEP, self._asleep.current)

    @property
    def sleep_orders(self) -> dict[int, str]:
        """The instances that are to sleep, with the values of their keys."""
        return self._by_instance(SLEEP, self._to_sleep.current)

    def _by_instance(self, keys: InstanceKeys, current: Mapping[str, str]) -> dict[int, str]:
        found = {keys.instance(self._namespace, key): value for key, value in current.items()}
        return {instance_id: value for instance_id, value in found.items() if instance_id}

    def put_to_sleep(self, instance_id: int, level: str) -> None:
        """Have frontends leave the instance alone, and its worker put its engine to sleep then."""
        puts = {SLEEP.key(self._namespace, instance_id): level}
        self._tasks.spawn(self._commit(Transaction(puts=puts, lease=instance_id)), "put to sleep")

    def wake_up(self, instance_id: int) -> None:
        """Have the instance's worker wake its engine; frontends go on when it is awake."""
        change = Transaction(
            puts={WAKE.key(self._namespace, instance_id): ""},
            deletes=(SLEEP.key(self._namespace, instance_id),),
            lease=instance_id,
        )
        self._tasks.spawn(self._commit(change), "wake up")

    @property
    def persisted(self) -> PersistedKeys | None:
        """The planner's keys and the live settings; None until the store has answered."""
        keys = self._keys
        if keys is None or not self._live.has_synced:
            return None
        live, settings = live_settings_prefix(self._namespace), self._live.current
        return PersistedKeys(
            by_name(self._namespace, keys),
            {key.removeprefix(live): settings[key] for key in settings},
        )

    def on_persisted_change(self, callback: Callable[[], None]) -> None:
        """Call back after every change of ``persisted``, from now on."""
        for watcher in (self._counts, self._live):
            watcher.on_change(callback)

    @property
    def instances(self) -> tuple[Any, ...] | None:
        """Every registration; None until the store has answered, the last known ones while it is away."""
        return self._discovery.all() if self._is_following else None

    def acknowledge(self, decision_id: int) -> None:
        self._enqueue(scaling_key(self._namespace, "scaled_decision_id"), str(decision_id))

    def publish_fleet(self, document: dict[str, Any]) -> None:
        """Have the document written into the store, where status and planner read it."""
        self._enqueue(fleet_key(self._namespace), json.dumps(document, separators=(",", ":")))

    async def read_persisted(self) -> PersistedKeys | None:
        """Read the planner's keys and the live settings again; None when the store does not answer.

        The settings first: when the store's id is among the planner's keys, no setting was missing because
        the store had lost it.
        """
        live = live_settings_prefix(self._namespace)
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                settings = await self._store.list(live)
                keys = await self._store.list(scaling_prefix(self._namespace))
        except (TimeoutError, TemporaryError, PermanentError) as error:
            log.debug("the planner's keys cannot be read: %s", error)
            return None
        return PersistedKeys(
            by_name(self._namespace, {item.key: item.value for item in keys}),
            {item.key.removeprefix(live): item.value for item in settings},
        )

    async def restore(self, lost: PersistedKeys) -> None:
        """Write keys that the store has lost in one transaction; none of them if one is there by then."""
        live = live_settings_prefix(self._namespace)
        puts = {live + name: value for name, value in lost.live.items()}
        puts |= {scaling_key(self._namespace, name): value for name, value in lost.planner.items()}
        await self._commit(Transaction(dict.fromkeys(puts, 0), puts))

    def replace(self, name: str, before: str, after: str) -> None:
        """Change a key of the planner, unless somebody else has changed it meanwhile; "" is a missing key."""
        self._tasks.spawn(self._replace(scaling_key(self._namespace, name), before, after), name)

    def decide_first(self, keys: dict[str, str]) -> None:
        """Write the first decision, these keys and values, unless somebody else has written one meanwhile."""
        known = self._keys
        if self._is_deciding or known is None:
            return
        self._is_deciding = True
        puts = {scaling_key(self._namespace, name): value for name, value in keys.items()}
        expected = {key: 0 for key in puts if key not in known}
        self._tasks.spawn(self._commit(Transaction(expected, puts)), "first decision")

    def revoke(self, lease: int) -> None:
        """Revoke the lease, again and again until the store has answered or it has expired by itself."""
        if lease not in self._revoking:
            self._revoking.add(lease)
            self._tasks.spawn(self._revoke(lease), "revoke")

    async def is_answering(self) -> bool:
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                await self._store.get(fleet_key(self._namespace))
            return True
        except (TimeoutError, TemporaryError, PermanentError):
            return False

    async def close(self) -> None:
        await self._tasks.cancel()
        await self._discovery.close()

    async def _follow_registrations(self) -> None:
        await self._discovery.start()
        self._is_following = True
        self._wake.set()

    @property
    def _keys(self) -> Mapping[str, str] | None:
        """The planner's keys and values; None until the store has answered."""
        return self._counts.current if self._counts.has_synced else None

    def _write_again(self) -> None:
        """Write all of this link's keys once more: a snapshot may come from a store that has lost them."""
        self._written.clear()
        self._has_work.set()
        self._wake.set()

    def _move_former_extensions(self) -> None:
        """Move extensions away from where 0.1.0 had them; one that is in both places was written since."""
        keys, namespace = self._counts.current, self._namespace
        former = former_extensions(namespace, keys)
        if not former:
            return
        places = {scaling_key(namespace, name): keys[old] for old, name in former.items()}
        puts = {key: value for key, value in places.items() if key not in keys}
        moved = Transaction(dict.fromkeys(puts, 0), puts, deletes=tuple(former))
        self._tasks.spawn(self._call(lambda: self._store.commit(moved)), "move keys of 0.1.0")

    def _name_unreadable(self) -> None:
        """Say once of every value that is no number that it is taken for "not set"."""
        before, self._named = self._named, {**self._counts.current, **self._live.current}
        changed = self._named.items() - before.items()
        for key, reason in unreadable(self._namespace, (KeyValue(*item) for item in changed)).items():
            log.warning("ignoring %s: it is %s", key, reason)
        self._wake.set()

    def _enqueue(self, key: str, value: str) -> None:
        self._wanted[key] = value
        if self._written.get(key) != value:
            self._has_work.set()

    async def _write(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            for key, value in list(self._wanted.items()):
                if self._written.get(key) != value and await self._call(partial(self._store.put, key, value)):
                    self._written[key] = value

    async def _replace(self, key: str, before: str, after: str) -> None:
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                item = await self._store.get(key)
                if (item.value if item else "") == before:
                    expected = {key: item.revision if item else 0}
                    await self._store.commit(Transaction(expected, {key: after}))
        except (TimeoutError, TemporaryError, PermanentError) as error:
            log.debug("%s stays as it is for now: %s", key, error)

    async def _commit(self, transaction: Transaction) -> None:
        try:
            await self._call(lambda: self._store.commit(transaction))
        finally:
            self._is_deciding = False
            self._wake.set()

    async def _revoke(self, lease: int) -> None:
        try:
            async with asyncio.timeout(REVOKE_FOR_S):
                while not await self._call(lambda: self._store.revoke(lease)):
                    self.unanswered.add(lease)
                    self._wake.set()
        except TimeoutError:
            log.warning("lease %x was not revoked; it has expired by now", lease)
        finally:
            self._revoking.discard(lease)

    async def _call(self, call: Callable[[], Awaitable[object]]) -> bool:
        """Make the call; return True when the store has answered, False after a pause when it has not."""
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                await call()
            return True
        except (TimeoutError, TemporaryError) as error:
            log.warning("the store does not answer: %s", error or "no answer in time")
            self._has_work.set()
            await asyncio.sleep(RETRY_S)
            return False
        except PermanentError as error:
            log.warning("the store refused: %s", error)
            return True  # the same call would be refused again
