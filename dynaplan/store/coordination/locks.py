"""Read and write locks over the key-value store, for any number of processes.

The keys are those of the original: ``v1/{prefix}/writer`` and ``v1/{prefix}/readers/{id}``, each under a
lease of its own, so that a holder that dies blocks nobody beyond the lease's time to live. Only single keys
are created and read, so the locks hold on every store:

- A writer creates the writer's key, which at most one can, and then waits until no reader's key is left.
- A reader creates its own key, and then looks for the writer's; when that is there it takes its own away
  again and waits.

Whichever of the two came second sees the other's key. A writer that waits has its key already, and so keeps
new readers out. A lock cannot be made the other kind while it is held: release it first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from dynaplan.config.settings.servers import LEASE_TTL_S
from dynaplan.store.coordination.held_lock import HeldLock
from dynaplan.store.coordination.kept_lease import KeptLease
from dynaplan.store.coordination.prefix_watcher import PrefixWatcher, full_key_string
from dynaplan.store.model import KeyValue, Transaction
from dynaplan.store.port import KeyValueStore, LeaseKeeper
from dynaplan.util.backoff import Backoff
from dynaplan.util.clock import Clock
from dynaplan.util.errors import ConfigError, LockNotFree, PermanentError, StoreUnavailable

WRITING, READING = "writing", "reading"
"""The keys' values, as the original writes them."""

RETRY_FIRST_S = 0.1
RETRY_LONGEST_S = 2.0


@dataclass(frozen=True)
class LockKeys:
    """The keys of the locks of one prefix, which is one or more names with ``/`` between."""

    prefix: str

    def __post_init__(self) -> None:
        names = self.prefix.split("/")
        if not all(names) or {"writer", "readers"} & set(names):
            raise ConfigError(
                f"{self.prefix!r} cannot be locked: it has an empty name, or the name writer or readers",
                hint="Take one name or more with / between, as in models/llama.",
            )

    @property
    def all(self) -> str:
        """The prefix that the keys of writer, readers and waiters have in common."""
        return f"v1/{self.prefix}/"

    @property
    def writer(self) -> str:
        """The key that the one writer holds under its lease."""
        return f"{self.all}writer"

    @property
    def readers(self) -> str:
        """The prefix of the readers' keys."""
        return f"{self.all}readers/"

    def reader(self, lease: int) -> str:
        """The key of the reader with that lease."""
        return f"{self.readers}{lease:x}"


class _Attempt:
    """One attempt to get a lock, under a lease that ends with it unless it leads to a lock."""

    def __init__(self, store: KeyValueStore, prefix: str, lease: KeptLease) -> None:
        self._store = store
        self._prefix = prefix
        self._key = ""
        self._has_led_to_a_lock = False
        self.lease = lease

    async def __aenter__(self) -> _Attempt:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._has_led_to_a_lock:
            await self.lease.end()

    async def create(self, key: str, value: str) -> bool:
        """Create the key; False when it is another's, or the lease is lost."""
        self._key = key
        try:
            transaction = Transaction({key: 0}, {key: value}, lease=self.lease.number)
            return await self._store.commit(transaction) or await self._own() is not None
        except PermanentError as error:
            self.lease.lose(str(error))
            return False

    async def lock(self) -> HeldLock | None:
        """Return the lock; None when the own key is gone meanwhile, or the lease is lost."""
        item = await self._own()
        if item is None or not self.lease.is_alive:
            return None
        self._has_led_to_a_lock = True
        return HeldLock(self._store, self._prefix, item, self.lease)

    async def _own(self) -> KeyValue | None:
        item = await self._store.get(self._key)
        return item if item and item.lease == self.lease.number else None

    async def until(self, changed: asyncio.Event) -> None:
        """Wait for a change, or for the loss of the lease."""
        waits = [asyncio.create_task(event.wait()) for event in (changed, self.lease.lost)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()


class Locks:
    """The locks of a key-value store: many readers, or one writer, for each prefix.

    A lock that is held has a lease of ``ttl_s`` seconds, kept alive in the background. The two ``try_``
    methods raise StoreUnavailable when the store does not answer; the other two wait for it. A prefix with an
    empty name in it, or the name ``writer`` or ``readers``, is a ConfigError.
    """

    def __init__(
        self, store: KeyValueStore, leases: LeaseKeeper, clock: Clock, ttl_s: int = LEASE_TTL_S
    ) -> None:
        self._store = store
        self._leases = leases
        self._clock = clock
        self._ttl_s = ttl_s

    async def try_write_lock(self, prefix: str) -> HeldLock | None:
        """Return the write lock, or None when somebody reads or writes, or tries to at this moment."""
        keys = LockKeys(prefix)
        if await self._store.get(keys.writer):
            return None
        async with await self._attempt(keys) as attempt:
            if await attempt.create(keys.writer, WRITING) and not await self._store.list(keys.readers):
                return await attempt.lock()
        return None

    async def try_read_lock(self, prefix: str) -> HeldLock | None:
        """Return a read lock, or None when somebody writes, or waits or tries to."""
        keys = LockKeys(prefix)
        return None if await self._store.get(keys.writer) else await self._enter(keys)

    async def write_lock_with_wait(self, prefix: str, timeout_s: float | None = None) -> HeldLock:
        """Return the write lock when it is free; new readers are kept out as soon as no other writes.

        Raises LockNotFree when it is not free in time.
        """
        return await self._waiting(LockKeys(prefix), self._write, timeout_s)

    async def read_lock_with_wait(self, prefix: str, timeout_s: float | None = None) -> HeldLock:
        """Return a read lock when nobody writes, or waits to; raises LockNotFree when that is not in time."""
        return await self._waiting(LockKeys(prefix), self._read, timeout_s)

    async def _waiting(
        self,
        keys: LockKeys,
        acquire: Callable[[LockKeys, asyncio.Event], Awaitable[HeldLock]],
        timeout_s: float | None,
    ) -> HeldLock:
        changed = asyncio.Event()
        watcher = PrefixWatcher(self._store, keys.all, full_key_string, _whole)
        watcher.on_change(changed.set)
        following = asyncio.create_task(watcher.run())
        acquiring = asyncio.create_task(self._persistently(keys, changed, acquire))
        is_returned = False
        try:
            tasks = {acquiring, following}
            await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if acquiring.done():
                lock = acquiring.result()
                is_returned = True
                return lock
            if following.done():
                following.result()
                raise StoreUnavailable("the store was closed")
            raise LockNotFree(f"{keys.prefix} was not free within {timeout_s:g} s")
        finally:
            following.cancel()
            if not is_returned:
                acquiring.cancel()
                (left,) = await asyncio.gather(acquiring, return_exceptions=True)
                if isinstance(left, HeldLock):
                    await left.release()

    async def _persistently(
        self,
        keys: LockKeys,
        changed: asyncio.Event,
        acquire: Callable[[LockKeys, asyncio.Event], Awaitable[HeldLock]],
    ) -> HeldLock:
        """Acquire, again and again while the store is away."""
        backoff = Backoff(RETRY_FIRST_S, RETRY_LONGEST_S, self._clock.sleep)
        while True:
            try:
                return await acquire(keys, changed)
            except StoreUnavailable:
                await backoff.pause()

    async def _write(self, keys: LockKeys, changed: asyncio.Event) -> HeldLock:
        while True:
            changed.clear()
            if await self._store.get(keys.writer):
                await self._news(changed)
                continue
            async with await self._attempt(keys) as attempt:
                is_ours = await attempt.create(keys.writer, WRITING)
                while is_ours and attempt.lease.is_alive:
                    changed.clear()
                    if await self._store.list(keys.readers):
                        await attempt.until(changed)
                    elif lock := await attempt.lock():
                        return lock
                    else:
                        break

    async def _news(self, changed: asyncio.Event) -> None:
        """Wait for a change, but no longer than a dead holder's lease lives."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._ttl_s):
                await changed.wait()

    async def _read(self, keys: LockKeys, changed: asyncio.Event) -> HeldLock:
        while True:
            changed.clear()
            if await self._store.get(keys.writer):
                await self._news(changed)
            elif lock := await self._enter(keys):
                return lock

    async def _enter(self, keys: LockKeys) -> HeldLock | None:
        """Create a reader's key, and take it away again when there is a writer."""
        async with await self._attempt(keys) as attempt:
            is_ours = await attempt.create(keys.reader(attempt.lease.number), READING)
            if is_ours and not await self._store.get(keys.writer):
                return await attempt.lock()
        return None

    async def _attempt(self, keys: LockKeys) -> _Attempt:
        lease = await KeptLease.granted(self._leases, self._clock, self._ttl_s)
        return _Attempt(self._store, keys.prefix, lease)


def _whole(item: KeyValue) -> KeyValue:
    return item
