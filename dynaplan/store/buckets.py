"""Buckets: bytes under flat keys in a named part of the key-value store, on every store the same.

The key ``ns/backend/generate/a1`` of the bucket ``v1/instances`` is the store's key
``v1/instances/ns/backend/generate/a1``. The store's values are text; bytes that are no UTF-8 travel in it by
``surrogateescape``, and come back as they were.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from dynaplan.store.model import Deleted, KeyValue, Put, Snapshot, Transaction
from dynaplan.store.port import KeyValueStore
from dynaplan.util.errors import ConfigError


@dataclass(frozen=True)
class BucketEntry:
    """The value of a key of a bucket, the revision of its last change, and its lease (0: none)."""

    value: bytes
    revision: int
    lease: int = 0


@dataclass(frozen=True)
class BucketChange:
    """A key of a bucket was written, or is gone: then there is no entry."""

    key: str
    entry: BucketEntry | None


class Bucket:
    """One bucket of a store; any name with or without ``/`` in it. Buckets need not be made before their use.

    Every method raises StoreUnavailable when the store does not answer, and ConfigError for an empty key.
    A write under a lease that does not exist is a PermanentError.
    """

    def __init__(self, store: KeyValueStore, name: str) -> None:
        if not all(name.split("/")):
            raise ConfigError(f"{name!r} is no bucket", hint="Take a name, as in v1/instances.")
        self._store = store
        self._prefix = f"{name}/"
        self.name = name

    async def get(self, key: str) -> BucketEntry | None:
        """Return the key's entry, or None when there is none."""
        item = await self._store.get(self._whole(key))
        return _entry(item) if item else None

    async def list(self) -> dict[str, BucketEntry]:
        """Return every entry by its key, in key order."""
        return self._entries(await self._store.list(self._prefix))

    async def put(self, key: str, value: bytes, lease: int = 0) -> None:
        """Write the key, under a lease unless 0."""
        await self._store.put(self._whole(key), _text(value), lease)

    async def delete(self, key: str) -> None:
        """Remove the key; nothing happens when it is absent."""
        await self._store.delete(self._whole(key))

    async def create(self, key: str, value: bytes, lease: int = 0) -> bool:
        """Write the key if it is absent; False, and nothing written, when it is there."""
        return await self.replace(key, value, 0, lease)

    async def replace(self, key: str, value: bytes, revision: int, lease: int = 0) -> bool:
        """Write the key if it has that revision; False, and nothing written, when it has another."""
        whole = self._whole(key)
        return await self._store.commit(Transaction({whole: revision}, {whole: _text(value)}, lease=lease))

    async def watch(self) -> AsyncIterator[Mapping[str, BucketEntry] | BucketChange]:
        """Yield all entries by key, then every change, without a gap, until closed.

        After an outage in which the store has forgotten changes, all entries come again, and replace those
        known before.
        """
        async for event in self._store.watch(self._prefix):
            match event:
                case Snapshot(items):
                    yield self._entries(items)
                case Put(item):
                    yield BucketChange(item.key.removeprefix(self._prefix), _entry(item))
                case Deleted(key):
                    yield BucketChange(key.removeprefix(self._prefix), None)

    def _entries(self, items: tuple[KeyValue, ...]) -> dict[str, BucketEntry]:
        return {item.key.removeprefix(self._prefix): _entry(item) for item in items}

    def _whole(self, key: str) -> str:
        if not key:
            raise ConfigError(f"a key of the bucket {self.name} is empty")
        return self._prefix + key


def _entry(item: KeyValue) -> BucketEntry:
    return BucketEntry(item.value.encode(errors="surrogateescape"), item.revision, item.lease)


def _text(value: bytes) -> str:
    return value.decode(errors="surrogateescape")
