"""The key-value store and its leases in this process: for tests and for trying things out."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from functools import cache

from dynaplan.store.hub import WatchHub
from dynaplan.store.model import Deleted, KeyValue, Put, Transaction, WatchEvent
from dynaplan.util.clock import Clock, SystemClock
from dynaplan.util.errors import PermanentError, StoreUnavailable


@dataclass
class _Lease:
    ttl_s: float
    until_s: float


class MemoryStore:
    """The twin of ``EtcdStore``: revisions, leases, transactions and watches behave as in etcd.

    Leases expire by the clock given, whenever the store is used and at ``expire()``. While
    ``is_available`` is False every call raises StoreUnavailable, as when etcd is down; ``wipe()`` makes it an
    empty store with another identity.
    """

    def __init__(self, clock: Clock) -> None:
        self.is_available = True
        self._clock = clock
        self._hub = WatchHub(has_synced=True)
        self._leases: dict[int, _Lease] = {}
        self._revision = 0
        self._identity = 1
        self._ids = itertools.count(0x694D98147D54BE01)

    @property
    def items(self) -> dict[str, KeyValue]:
        """The keys; those of a lease whose time is over may still be there."""
        return self._hub.items

    async def get(self, key: str) -> KeyValue | None:
        self._check_available()
        return self.items.get(key)

    async def list(self, prefix: str) -> tuple[KeyValue, ...]:
        self._check_available()
        return self._hub.list(prefix)

    async def put(self, key: str, value: str, lease: int = 0) -> None:
        self._check_available()
        self._change({key: value}, (), lease)

    async def delete(self, key: str) -> None:
        self._check_available()
        self._change({}, (key,))

    async def commit(self, transaction: Transaction) -> bool:
        self._check_available()
        for key, revision in transaction.expected.items():
            item = self.items.get(key)
            if (item.revision if item else 0) != revision:
                return False
        self._change(transaction.puts, transaction.deletes, transaction.lease)
        return True

    def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        return self._hub.watch(prefix)

    async def grant(self, ttl_s: int) -> int:
        """Make a lease of ``ttl_s`` seconds and return its id."""
        self._check_available()
        lease = next(self._ids)
        self._leases[lease] = _Lease(ttl_s, self._clock.now_s() + ttl_s)
        return lease

    async def keep_alive(self, lease: int) -> float:
        self._check_available()
        found = self._leases.get(lease)
        if found is None:
            return 0.0
        found.until_s = self._clock.now_s() + found.ttl_s
        return found.ttl_s

    async def revoke(self, lease: int) -> None:
        self._check_available()
        self._end_lease(lease)

    async def identity(self) -> str:
        """Return an identifier of the data; another one after ``wipe()``."""
        self._check_available()
        return str(self._identity)

    async def close(self) -> None:
        """Have every watch end its iteration; the keys stay."""
        self._hub.close()

    def expire(self) -> None:
        """End every lease whose time is over."""
        now_s = self._clock.now_s()
        for lease in [lease for lease, found in self._leases.items() if found.until_s <= now_s]:
            self._end_lease(lease)

    def wipe(self) -> None:
        """Lose everything, as an etcd that comes back with an empty disk; watches get a new snapshot."""
        self._leases.clear()
        self._revision = 0
        self._identity += 1
        self._hub.replace(())

    def _check_available(self) -> None:
        if not self.is_available or self._hub.is_closed:
            raise StoreUnavailable("the store in memory is switched off")
        self.expire()

    def _end_lease(self, lease: int) -> None:
        if self._leases.pop(lease, None) is not None:
            self._change({}, [key for key, item in self.items.items() if item.lease == lease])

    def _change(self, puts: dict[str, str], deletes: Iterable[str], lease: int = 0) -> None:
        """Apply all changes in one revision, as in one etcd transaction."""
        if puts and lease and lease not in self._leases:
            raise PermanentError("requested lease not found")
        gone = [key for key in deletes if key in self.items]
        if puts or gone:
            self._revision += 1
        items = [KeyValue(key, value, self._revision, lease) for key, value in puts.items()]
        self._hub.apply([*(Put(item) for item in items), *(Deleted(key) for key in gone)])


@cache
def process_store() -> MemoryStore:
    """Return the store that all of this process shares; it is never closed."""
    return MemoryStore(SystemClock())
