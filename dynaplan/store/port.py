"""Ports to the key-value store and its leases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from dynaplan.store.model import KeyValue, Transaction, WatchEvent
from dynaplan.util.connection import Closable


class KeyValueStore(Protocol):
    """Keys and values, both text. Every method raises StoreUnavailable when the store does not answer."""

    async def get(self, key: str) -> KeyValue | None:
        """Return the key's value and revision, or None when it is absent."""
        ...

    async def list(self, prefix: str) -> tuple[KeyValue, ...]:
        """Return every key under the prefix, in key order."""
        ...

    async def put(self, key: str, value: str, lease: int = 0) -> None:
        """Write the key, under a lease unless 0; raises PermanentError when the lease does not exist."""
        ...

    async def delete(self, key: str) -> None:
        """Remove the key; nothing happens when it is absent."""
        ...

    async def commit(self, transaction: Transaction) -> bool:
        """Carry the transaction out as a whole; False, and nothing written, when its expectation fails."""
        ...

    def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        """Yield a Snapshot, then every change, without a gap, until closed.

        An outage of the store is not an error here: the watch waits, and resumes where it was, or with
        a new Snapshot when the store no longer has the changes in between.
        """
        ...


class LeaseStore(Protocol):
    """Time-limited rights of keys to exist. Methods raise StoreUnavailable when the store does not answer."""

    async def grant(self, ttl_s: int) -> int:
        """Make a lease that lives ``ttl_s`` seconds unless renewed; return its id, between 0 and 2**63."""
        ...

    async def keep_alive(self, lease: int) -> float:
        """Renew the lease; return its new time to live in seconds, or 0.0 when it no longer exists."""
        ...

    async def revoke(self, lease: int) -> None:
        """End the lease and delete its keys; nothing happens when it no longer exists."""
        ...

    async def identity(self) -> str:
        """Return an identifier of this store's data; it changes when the store comes back empty."""
        ...


class Store(KeyValueStore, LeaseStore, Closable, Protocol):
    """A connection to a key-value store that keeps leases."""
