"""A lock that somebody holds."""

from __future__ import annotations

import asyncio

from dynaplan.store.coordination.kept_lease import KeptLease
from dynaplan.store.coordination.prefix_watcher import PrefixWatcher, full_key_string
from dynaplan.store.model import KeyValue
from dynaplan.store.port import KeyValueStore
from dynaplan.util.errors import LockLost


class HeldLock:
    """A read or write lock from its acquisition to ``release``: ``async with lock: ...``.

    It is lost when its lease is, and when its key is deleted: then ``is_held`` is False, ``lost`` is set, and
    ``async with`` raises LockLost at its end. Only ``fence`` protects from a holder that stands still for
    longer than its lease lives, and then goes on: pass it on, and let the receiver refuse what is lower than
    the highest writer's that it has seen.
    """

    def __init__(self, store: KeyValueStore, prefix: str, item: KeyValue, lease: KeptLease) -> None:
        self._lease = lease
        self._is_released = False
        self._watcher = PrefixWatcher(store, item.key, full_key_string, _lease_of)
        self._watcher.on_change(self._look)
        self._watching = asyncio.create_task(self._watcher.run(), name=f"lock {prefix}")
        self._watching.add_done_callback(self._stopped_watching)
        self.prefix = prefix
        self.key = item.key
        """The lock's key in the store."""
        self.fence = item.revision
        """The fencing number, higher than that of every writer before; until the store loses its data."""

    @property
    def is_held(self) -> bool:
        """True while nobody else can hold the lock."""
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

    def _look(self) -> None:
        if self._watcher.current.get(self.key) != self._lease.number:
            self._lease.lose(f"{self.key} was deleted")

    def _stopped_watching(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self._lease.lose(f"its key cannot be watched: {error}")


def _lease_of(item: KeyValue) -> int:
    return item.lease
