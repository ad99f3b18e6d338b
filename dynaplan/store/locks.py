"""Read and write locks over the key-value store, for any number of processes, and the lease under each.

The keys are those of the original: ``v1/{prefix}/writer`` and ``v1/{prefix}/readers/{id}``, each under a
lease of its own, so that a holder that dies blocks nobody beyond the lease's time to live. Only single keys
are created and read, so the locks hold on every store:

- A writer creates the writer's key, which at most one can, and then waits until no reader's key is left.
- A reader creates its own key, and then checks for the writer's; if that exists, it deletes its own and
  waits.

Whichever of the two came second sees the other's key. A writer that waits has its key already, and so keeps
new readers out. A lock cannot be made the other kind while it is held: release it first.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from dynaplan.config.settings.servers import LEASE_TTL_S
from dynaplan.store.model import Deleted, KeyValue, Put, Snapshot, Transaction, WatchEvent
from dynaplan.store.port import KeyValueStore, LeaseStore, Store
from dynaplan.store.timing import (
    CALL_RETRY_MAX_S,
    CALL_RETRY_MIN_S,
    LEASE_REMAINING_MIN_S,
    LEASE_RENEWAL_RETRY_S,
    LEASE_REVOKE_TIMEOUT_S,
)
from dynaplan.util.backoff import Backoff
from dynaplan.util.clock import Clock
from dynaplan.util.errors import (
    ConfigError,
    DynaplanError,
    LockLost,
    LockNotFree,
    PermanentError,
    StoreUnavailable,
)

WRITING, READING = "writing", "reading"
"""The keys' values, as the original writes them."""


class LockKeys:
    """The keys of the locks of one prefix, which is one or more names with ``/`` between.

    ``all`` is their common prefix, ``writer`` the key that the one writer holds, and ``readers`` the prefix
    of the readers' keys.
    """

    def __init__(self, prefix: str) -> None:
        names = prefix.split("/")
        if not all(names) or {"writer", "readers"} & set(names):
            raise ConfigError(
                f"{prefix!r} cannot be locked: it has an empty name, or the name writer or readers",
                hint="Take one name or more with / between, as in models/llama.",
            )
        self.prefix = prefix
        self.all = f"v1/{prefix}/"
        self.writer = f"{self.all}writer"
        self.readers = f"{self.all}readers/"


class HeldLock:
    """A read or write lock from its acquisition to ``release``: ``async with lock: ...``.

    It is lost when its lease is, and when its key is deleted: then ``is_held`` is False, ``lost`` is set,
    and ``async with`` raises LockLost at its end. A holder that stands still for longer than its lease lives
    does not notice that in time. So pass ``fence``, a number that rises with each lock, on to what the lock
    protects, which then refuses numbers lower than the highest that a writer has shown it.
    """

    def __init__(self, store: KeyValueStore, prefix: str, item: KeyValue, lease: RenewedLease) -> None:
        self._lease = lease
        self._is_released = False
        self._watching = asyncio.create_task(self._watch(store), name=f"lock {prefix}")
        self._watching.add_done_callback(self._on_watch_ended)
        self.prefix = prefix
        self.key = item.key
        """The lock's key in the store."""
        self.fence = item.revision
        """The fencing number, higher than that of every writer before; until the store loses its data."""

    @property
    def is_held(self) -> bool:
        """True while the lock is certainly held: not released, and its lease not lost."""
        return not self._is_released and self._lease.is_alive

    @property
    def lost(self) -> asyncio.Event:
        """Set when the lock is lost, but not by ``release``."""
        return self._lease.lost

    async def release(self) -> None:
        """Give the lock up; nothing happens the second time, or when it is lost.

        Bounded: when the store is away the lock's lease is left to expire.
        """
        self._is_released = True
        self._watching.cancel()
        await self._lease.end()

    async def __aenter__(self) -> HeldLock:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_lost = not self._is_released and not self.is_held
        await self.release()
        if is_lost and kind is None:
            raise LockLost(f"the lock on {self.prefix} was lost while it was in use")

    async def _watch(self, store: KeyValueStore) -> None:
        """Lose the lease as soon as the key is not ours any more."""
        async for event in store.watch(self.key):
            lease = _lease_after(self.key, event)
            if lease is not None and lease != self._lease.number:
                self._lease.mark_lost(f"{self.key} was deleted")

    def _on_watch_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self._lease.mark_lost(f"its key cannot be watched: {error}")


def _lease_after(key: str, event: WatchEvent) -> int | None:
    """Return the lease of the key after the event, 0 without one; None for an event of another key."""
    match event:
        case Snapshot(items):
            return next((item.lease for item in items if item.key == key), 0)
        case Put(item):
            return item.lease if item.key == key else None
        case Deleted(deleted):
            return 0 if deleted == key else None


class Locks:
    """The locks of a key-value store: many readers, or one writer, for each prefix.

    A lock that is held has a lease of ``ttl_s`` seconds, kept alive in the background. The two ``try_``
    methods raise StoreUnavailable when the store does not answer; the other two wait for it. A prefix with an
    empty name in it, or the name ``writer`` or ``readers``, is a ConfigError.
    """

    def __init__(self, store: Store, clock: Clock, ttl_s: int = LEASE_TTL_S) -> None:
        self._store = store
        self._clock = clock
        self._ttl_s = ttl_s

    async def try_write_lock(self, prefix: str) -> HeldLock | None:
        """Return the write lock, or None when somebody reads or writes, or tries to at this moment."""
        keys = LockKeys(prefix)
        return None if await self._store.get(keys.writer) else await self._try_acquire(keys, is_writer=True)

    async def try_read_lock(self, prefix: str) -> HeldLock | None:
        """Return a read lock, or None when somebody writes, or waits or tries to."""
        keys = LockKeys(prefix)
        return None if await self._store.get(keys.writer) else await self._try_acquire(keys, is_writer=False)

    async def write_lock_with_wait(self, prefix: str, timeout_s: float | None = None) -> HeldLock:
        """Wait for the write lock and return it; new readers are kept out once no other process writes.

        Raises LockNotFree when it is not free within ``timeout_s`` seconds (None: waits without end).
        """
        return await self._wait(LockKeys(prefix), is_writer=True, timeout_s=timeout_s)

    async def read_lock_with_wait(self, prefix: str, timeout_s: float | None = None) -> HeldLock:
        """Wait until nobody writes or waits to, and return a read lock.

        Raises LockNotFree when that is not so within ``timeout_s`` seconds (None: waits without end).
        """
        return await self._wait(LockKeys(prefix), is_writer=False, timeout_s=timeout_s)

    async def _wait(self, keys: LockKeys, *, is_writer: bool, timeout_s: float | None) -> HeldLock:
        changed = asyncio.Event()

        async def watch() -> None:
            async for _ in self._store.watch(keys.all):
                changed.set()
            raise StoreUnavailable("the store was closed")

        watching = asyncio.create_task(watch())
        acquiring = asyncio.create_task(self._acquire(keys, changed, is_writer=is_writer))
        is_returned = False
        try:
            tasks = {acquiring, watching}
            await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not acquiring.done() and not watching.done():
                raise LockNotFree(f"{keys.prefix} was not free within {timeout_s:g} s")
            if not acquiring.done():
                await watching  # It raises the reason for which it has ended.
            lock = await acquiring
            is_returned = True
            return lock
        finally:
            watching.cancel()
            if not is_returned:
                acquiring.cancel()
                (left,) = await asyncio.gather(acquiring, return_exceptions=True)
                if isinstance(left, HeldLock):
                    await left.release()

    async def _acquire(self, keys: LockKeys, changed: asyncio.Event, *, is_writer: bool) -> HeldLock:
        """Try after each change, and again and again while the store is away."""
        backoff = Backoff(CALL_RETRY_MIN_S, CALL_RETRY_MAX_S, self._clock.sleep)
        while True:
            changed.clear()
            try:
                if await self._store.get(keys.writer):
                    # No longer than a dead holder's lease lives: its end might not be reported.
                    # Not wait_for: in Python 3.11 that loses a cancellation that comes with the change.
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._ttl_s):
                            await changed.wait()
                elif lock := await self._try_acquire(keys, changed, is_writer=is_writer):
                    return lock
            except StoreUnavailable:
                await backoff.pause()

    async def _try_acquire(
        self, keys: LockKeys, changed: asyncio.Event | None = None, *, is_writer: bool
    ) -> HeldLock | None:
        """Create the own key, then check for keys of others that are in the way; return the lock if none is.

        Else the own key is removed, and None returned. With ``changed``, which is set at each change of the
        keys, a writer first waits, keeping its key, until the readers have gone.
        """
        lease = await RenewedLease.grant(self._store, self._clock, self._ttl_s)
        key = keys.writer if is_writer else f"{keys.readers}{lease.number:x}"
        lock = None
        try:
            is_ours = await self._create(key, WRITING if is_writer else READING, lease)
            if is_ours and await self._is_alone(keys, lease, changed, is_writer=is_writer):
                lock = await self._confirm(keys, key, lease)
            return lock
        finally:
            if lock is None:
                await lease.end()

    async def _create(self, key: str, value: str, lease: RenewedLease) -> bool:
        """Create the key; False when another process has it, or the lease is lost."""
        try:
            transaction = Transaction({key: 0}, {key: value}, lease=lease.number)
            return await self._store.commit(transaction) or await self._get_own_key(key, lease) is not None
        except PermanentError as error:
            lease.mark_lost(str(error))
            return False

    async def _is_alone(
        self, keys: LockKeys, lease: RenewedLease, changed: asyncio.Event | None, *, is_writer: bool
    ) -> bool:
        if not is_writer:
            return await self._store.get(keys.writer) is None
        while lease.is_alive:
            if changed:
                changed.clear()
            if not await self._store.list(keys.readers):
                return True
            if changed is None:
                return False
            await _wait_any(changed, lease.lost)
        return False

    async def _confirm(self, keys: LockKeys, key: str, lease: RenewedLease) -> HeldLock | None:
        """Return the lock; None when the own key is gone meanwhile, or the lease is lost."""
        item = await self._get_own_key(key, lease)
        return HeldLock(self._store, keys.prefix, item, lease) if item and lease.is_alive else None

    async def _get_own_key(self, key: str, lease: RenewedLease) -> KeyValue | None:
        item = await self._store.get(key)
        return item if item and item.lease == lease.number else None


async def _wait_any(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waits:
            each.cancel()


log = logging.getLogger(__name__)


class RenewedLease:
    """A lease from ``grant`` to ``end``.

    It counts as lost when the store reports that it is gone, and when no renewal was answered within its
    time to live. That time counts from the moment at which the renewal was sent, so the lease is lost here
    before the store lets it lapse and gives its keys to another.
    """

    def __init__(self, leases: LeaseStore, clock: Clock, number: int, lives_until_s: float) -> None:
        self._leases = leases
        self._clock = clock
        self._expires_at_s = lives_until_s
        self._is_ended = False
        self._keeping = asyncio.create_task(self._keep(), name=f"lease {number:x}")
        self.number = number
        """The lease's id in the store."""
        self.lost = asyncio.Event()
        """Set when the lease is lost; not when its holder has ended it."""

    @classmethod
    async def grant(cls, leases: LeaseStore, clock: Clock, ttl_s: int) -> RenewedLease:
        """Make a lease; raises StoreUnavailable when the store does not answer."""
        asked_s = clock.now_s()
        return cls(leases, clock, await leases.grant(ttl_s), asked_s + ttl_s)

    @property
    def is_alive(self) -> bool:
        """True while the store certainly keeps the lease."""
        is_in_time = self._clock.now_s() < self._expires_at_s
        return is_in_time and not self._is_ended and not self.lost.is_set()

    def mark_lost(self, why: str) -> None:
        """Give the lease up, for instance because its key is gone; ``why`` is for the log."""
        if not self._is_ended and not self.lost.is_set():
            log.warning("lease %x is lost: %s", self.number, why)
            self.lost.set()

    async def end(self) -> None:
        """Revoke the lease, and with it its keys; nothing happens the second time.

        Bounded: when the store is away the lease is left to expire.
        """
        if self._is_ended:
            return
        self._is_ended = True
        self._keeping.cancel()
        try:
            async with asyncio.timeout(LEASE_REVOKE_TIMEOUT_S):
                await self._leases.revoke(self.number)
        except (TimeoutError, DynaplanError) as error:
            log.debug("lease %x expires by itself: %s", self.number, error or "no answer")

    async def _keep(self) -> None:
        """Renew when half of the remaining time is over."""
        pause_s = self._left_s / 2
        while not self.lost.is_set():
            await self._clock.sleep(pause_s)
            pause_s = self._left_s / 2 if await self._renew() else min(LEASE_RENEWAL_RETRY_S, self._left_s)
            if pause_s < LEASE_REMAINING_MIN_S:
                self.mark_lost("the store has not renewed it in time")

    async def _renew(self) -> bool:
        sent_s = self._clock.now_s()
        try:
            async with asyncio.timeout(max(self._left_s, 0.0)):
                ttl_s = await self._leases.keep_alive(self.number)
        except (TimeoutError, DynaplanError) as error:
            log.debug("lease %x was not renewed: %s", self.number, error or "no answer")
            return False
        self._expires_at_s = sent_s + ttl_s
        return True

    @property
    def _left_s(self) -> float:
        return self._expires_at_s - self._clock.now_s()
