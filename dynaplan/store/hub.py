"""Watches of a store: one mirror of its keys in this process, and the watches that it feeds.

A store follows its data by its own means, and updates the mirror::

    replace   everything may be new     each watch gets a Snapshot
    update    everything is known       each watch gets the differences
    apply     these are the changes     each watch gets those of its prefix

A slow reader delays nobody: the queue of its watch is unbounded, and it gets every change when it continues.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from dynaplan.store.model import Deleted, KeyValue, Put, Snapshot, WatchEvent


@dataclass(eq=False)
class _Watch:
    """One watch. Its Snapshot must not be older than ``since``, a version of the hub's mirror."""

    prefix: str
    since: int
    has_started: bool = False
    events: asyncio.Queue[WatchEvent | BaseException | None] = field(default_factory=asyncio.Queue)


class WatchHub:
    """A mirror of a store's keys (``items``), and the watches that are fed from it.

    ``version`` says how new the mirror is, as a number of the store's own. Until ``has_synced`` is True the
    mirror is incomplete, and watches wait.
    """

    def __init__(self, *, has_synced: bool = False) -> None:
        self.items: dict[str, KeyValue] = {}
        self.version = 0
        self.has_synced = has_synced
        self.is_closed = False
        self._watches: list[_Watch] = []

    def list(self, prefix: str) -> tuple[KeyValue, ...]:
        """Return the keys with the prefix, in key order."""
        return tuple(self.items[key] for key in sorted(self.items) if key.startswith(prefix))

    async def watch(self, prefix: str, since: int = 0) -> AsyncGenerator[WatchEvent]:
        """Yield a Snapshot that is not older than the version ``since``, then every change, until ``close``.

        Raises the error that ``fail`` was called with.
        """
        if self.is_closed:
            return
        watch = _Watch(prefix, since)
        self._watches.append(watch)
        self._start(watch)
        try:
            while (event := await watch.events.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            self._watches.remove(watch)

    def replace(self, items: Iterable[KeyValue], version: int = 0) -> None:
        """Replace all keys; every watch begins anew with them: what has changed in between is not known."""
        self.items = {item.key: item for item in items}
        self.version = version
        self.has_synced = True
        for watch in self._watches:
            watch.has_started = False
            self._start(watch)

    def update(self, items: Mapping[str, KeyValue]) -> None:
        """Set the mirror to exactly these keys; watches get the differences as changes."""
        if not self.has_synced:
            self.replace(items.values())
            return
        gone = self.items.keys() - items.keys()
        changed = [item for key, item in items.items() if self.items.get(key) != item]
        self.apply([*(Deleted(key) for key in gone), *(Put(item) for item in changed)])

    def apply(self, events: Iterable[Put | Deleted], version: int = 0) -> None:
        """Apply changes in their order; a ``version`` of 0 leaves the mirror's as it is."""
        for event in events:
            if isinstance(event, Put):
                key = event.item.key
                self.items[key] = event.item
            else:
                key = event.key
                self.items.pop(key, None)
            for watch in self._watches:
                if watch.has_started and key.startswith(watch.prefix):
                    watch.events.put_nowait(event)
        if version:
            self.version = version
            for watch in self._watches:
                self._start(watch)

    def invalidate(self) -> None:
        """Make new watches wait for ``replace``: changes are being missed."""
        self.has_synced = False
        for watch in self._watches:
            watch.since = 0  # What is read from now on is newer.

    def fail(self, error: BaseException) -> None:
        """End the watches there are with an error; later ones may begin."""
        for watch in self._watches:
            watch.events.put_nowait(error)

    def close(self) -> None:
        """End every watch after its queued events, and start none."""
        self.is_closed = True
        for watch in self._watches:
            watch.events.put_nowait(None)

    def _start(self, watch: _Watch) -> None:
        if self.has_synced and not watch.has_started and self.version >= watch.since:
            watch.has_started = True
            watch.events.put_nowait(Snapshot(self.list(watch.prefix)))


async def ensure_identity(
    read: Callable[[], Awaitable[str | None]], create: Callable[[str], Awaitable[object]]
) -> str:
    """Return the random mark in a store's data; the first client that finds none writes it.

    ``create`` writes the mark unless somebody is faster. A mark in the data changes when they are lost; a
    server's own id does not.
    """
    while (mark := await read()) is None:
        await create(secrets.token_hex(8))
    return mark
