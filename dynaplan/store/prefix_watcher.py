"""The typed prefix watcher: a mapping of what is under a prefix of the key-value store, always current."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

from dynaplan.store.model import Deleted, KeyValue, Put, Snapshot, WatchEvent
from dynaplan.store.port import KeyValueStore

log = logging.getLogger(__name__)

MAX_IGNORED = 1000
"""The number of unreadable keys whose faults are remembered, so that each is logged once."""

K = TypeVar("K")
V = TypeVar("V")

KeyExtractor = Callable[[KeyValue, str], K]
"""Makes a mapping's key of an item and the watched prefix; raises ValueError for an item that has none."""

ValueExtractor = Callable[[KeyValue], V]
"""Makes a mapping's value of an item; raises ValueError for what it cannot read."""


def lease_id(item: KeyValue, prefix: str) -> int:
    """Extract the id of the lease that the key lives under."""
    if not item.lease:
        raise ValueError("it lives under no lease")
    return item.lease


def key_string(item: KeyValue, prefix: str) -> str:
    """Extract the key without the watched prefix."""
    return item.key.removeprefix(prefix)


def full_key_string(item: KeyValue, prefix: str) -> str:
    """Name a value by its whole key, its prefix included."""
    return item.key


def value_string(item: KeyValue) -> str:
    return item.value


class PrefixWatcher(Generic[K, V]):
    """The mapping of the keys under a prefix, kept current by a watch.

    While the store is away the last known mapping stays; when it is back, a Snapshot replaces it. A value
    that an extractor refuses with ValueError is logged once for each key and fault, and skipped: what the
    key held before stays until it is deleted or a Snapshot comes. Where several keys are extracted to the
    same one, the last in key order counts.
    """

    def __init__(
        self,
        store: KeyValueStore,
        prefix: str,
        key: KeyExtractor[K],
        value: ValueExtractor[V],
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._key = key
        self._value = value
        self._entries: dict[str, tuple[K, V]] = {}
        self._current: Mapping[K, V] = {}
        self._ignored: dict[str, str] = {}
        self._on_change: list[Callable[[], Any]] = []
        self._on_snapshot: list[Callable[[], Any]] = []
        self._known = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def current(self) -> Mapping[K, V]:
        """The mapping as it is known now, in key order; a later change makes another mapping."""
        return self._current

    @property
    def has_synced(self) -> bool:
        """True from the first Snapshot on."""
        return self._known.is_set()

    def on_change(self, callback: Callable[[], Any]) -> Callable[[], None]:
        """Call back after the first Snapshot, and after every change of the mapping, from now on.

        Return the function that ends it.
        """
        self._on_change.append(callback)

        def stop() -> None:
            with suppress(ValueError):  # It was ended before.
                self._on_change.remove(callback)

        return stop

    def on_snapshot(self, callback: Callable[[], Any]) -> None:
        """Call back after every Snapshot: the store may have lost what was written to it before."""
        self._on_snapshot.append(callback)

    async def run(self) -> None:
        """Follow the prefix, until the store is closed; ``start`` does this in the background."""
        async for event in self._store.watch(self._prefix):
            is_news = self._apply(event) or not self.has_synced
            self._known.set()
            for callback in self._on_snapshot if isinstance(event, Snapshot) else ():
                callback()
            for callback in tuple(self._on_change) if is_news else ():
                callback()

    async def start(self) -> None:
        """Follow the prefix in the background; return when the first Snapshot is there, however late."""
        self._task = asyncio.create_task(self.run(), name=f"watch {self._prefix}")
        known = asyncio.create_task(self._known.wait())
        try:
            await asyncio.wait({self._task, known}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        finally:
            known.cancel()
        if self._task.done():
            self._task.result()

    async def wait_failed(self) -> None:
        """Raise the error that ended the watch, a fault of ours; without one it does not return."""
        if self._task:
            await asyncio.shield(self._task)

    async def close(self) -> None:
        """Stop the watch; the last known mapping stays readable."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _apply(self, event: WatchEvent) -> bool:
        """Take the event over; return True when the mapping has changed."""
        before = self._entries
        match event:
            case Snapshot(items):
                self._entries = {item.key: entry for item in items if (entry := self._read(item))}
            case Put(item):
                if entry := self._read(item):
                    self._entries = {**before, item.key: entry}
            case Deleted(key):
                self._entries = {known: entry for known, entry in before.items() if known != key}
        if self._entries == before:
            return False
        self._entries = dict(sorted(self._entries.items(), key=lambda each: each[0]))
        self._current = dict(self._entries.values())
        return True

    def _read(self, item: KeyValue) -> tuple[K, V] | None:
        """The extracted key and value; None for what cannot be read."""
        try:
            entry = self._key(item, self._prefix), self._value(item)
        except ValueError as error:
            if self._ignored.get(item.key) != str(error):
                log.warning("ignoring %s: %s", item.key, error)
            self._ignored[item.key] = str(error)
            while len(self._ignored) > MAX_IGNORED:
                del self._ignored[next(iter(self._ignored))]
            return None
        self._ignored.pop(item.key, None)
        return entry


async def watch_prefix_with_extraction(
    store: KeyValueStore,
    prefix: str,
    *,
    key: KeyExtractor[K],
    value: ValueExtractor[V],
) -> PrefixWatcher[K, V]:
    """Return a started watcher of the prefix, once its first Snapshot is there, however late that is."""
    watcher = PrefixWatcher(store, prefix, key, value)
    await watcher.start()
    return watcher
