"""A mapping of what is under a prefix of the key-value store, always current."""

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

V = TypeVar("V")

ValueReader = Callable[[KeyValue], V]
"""Makes a mapping's value of an item; raises ValueError for what it cannot read."""


def value_string(item: KeyValue) -> str:
    return item.value


class PrefixWatcher(Generic[V]):
    """The values under a prefix by their keys, kept current by a watch.

    While the store is away the last known mapping stays; when it is back, a Snapshot replaces it. A value
    that ``read_value`` refuses with ValueError is logged once for each key and fault, and skipped: what the
    key held before stays until it is deleted or a Snapshot comes.
    """

    def __init__(
        self,
        store: KeyValueStore,
        prefix: str,
        read_value: ValueReader[V],
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._read_value = read_value
        self._current: Mapping[str, V] = {}
        self._ignored: dict[str, str] = {}
        self._on_change: list[Callable[[], Any]] = []
        self._on_snapshot: list[Callable[[], Any]] = []
        self._known = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def current(self) -> Mapping[str, V]:
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
        """Wait for the end of the watch that ``start`` began; raise the error, a bug, that ended it."""
        if self._task:
            await asyncio.shield(self._task)

    async def close(self) -> None:
        """Stop the watch; the last known mapping stays readable."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _apply(self, event: WatchEvent) -> bool:
        """Take the event over; return True when the mapping has changed."""
        now = dict(self._current)
        match event:
            case Snapshot(items):
                now = {item.key: value for item in items if (value := self._read(item)) is not None}
            case Put(item):
                # Unreadable, it leaves what was there; a Snapshot, which says all there is, does not.
                if (value := self._read(item)) is not None:
                    now[item.key] = value
            case Deleted(key):
                now.pop(key, None)
        if now == self._current:
            return False
        self._current = dict(sorted(now.items(), key=lambda each: each[0]))
        return True

    def _read(self, item: KeyValue) -> V | None:
        """Return the value; None for what cannot be read."""
        try:
            value = self._read_value(item)
        except ValueError as error:
            if self._ignored.get(item.key) != str(error):
                log.warning("ignoring %s: %s", item.key, error)
            self._ignored[item.key] = str(error)
            while len(self._ignored) > MAX_IGNORED:
                del self._ignored[next(iter(self._ignored))]
            return None
        self._ignored.pop(item.key, None)
        return value
