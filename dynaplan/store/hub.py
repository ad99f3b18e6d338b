"""Watches of a store: one mirror of its keys in this process, and the watches that it feeds.

A store follows its data by whatever means it has, and brings the mirror up to date::

    replace   everything may be new     each watch gets a Snapshot
    update    everything is known       each watch gets the differences
    apply     these are the changes     each watch gets those of its prefix

A watch holds back nothing and nobody: its queue is unbounded, so that a reader that pauses gets every change
when it goes on, and no other watch waits for it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from dynaplan.store.model import Deleted, KeyValue, Put, Snapshot, WatchEvent


@dataclass(eq=False)
class _Watch:
    """One watch. Its Snapshot must not be older than the version ``since`` of the mirror."""

    prefix: str
    since: int
    has_begun: bool = False
    events: asyncio.Queue[WatchEvent | BaseException | None] = field(default_factory=asyncio.Queue)


class WatchHub:
    """The mirror, ``items``, at a ``version`` that only the store interprets, and its watches.

    Unless ``is_known`` the mirror is incomplete, and watches wait for it.
    """

    def __init__(self, *, is_known: bool = False) -> None:
        self.items: dict[str, KeyValue] = {}
        self.version = 0
        self.is_known = is_known
        self.is_closed = False
        self._watches: list[_Watch] = []

    def __len__(self) -> int:
        """Return the number of watches."""
        return len(self._watches)

    def under(self, prefix: str) -> tuple[KeyValue, ...]:
        """Return the keys with the prefix, in key order."""
        return tuple(self.items[key] for key in sorted(self.items) if key.startswith(prefix))

    async def watch(self, prefix: str, since: int = 0) -> AsyncGenerator[WatchEvent]:
        """Yield a Snapshot that is not older than the version ``since``, then every change, until the end."""
        if self.is_closed:
            return
        watch = _Watch(prefix, since)
        self._watches.append(watch)
        self._begin(watch)
        try:
            while (event := await watch.events.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            self._watches.remove(watch)

    def replace(self, items: Iterable[KeyValue], version: int = 0) -> None:
        """Begin anew with these keys: nobody knows what has happened before."""
        self.items = {item.key: item for item in items}
        self.version = version
        self.is_known = True
        for watch in self._watches:
            watch.has_begun = False
            self._begin(watch)

    def update(self, items: Mapping[str, KeyValue]) -> None:
        """Have exactly these keys: what differs from the mirror has changed."""
        if not self.is_known:
            self.replace(items.values())
            return
        gone = self.items.keys() - items.keys()
        changed = [item for key, item in items.items() if self.items.get(key) != item]
        self.apply([*(Deleted(key) for key in gone), *(Put(item) for item in changed)])

    def apply(self, events: Iterable[Put | Deleted], version: int = 0) -> None:
        """Take changes in, in their order; a version of 0 leaves it as it is."""
        for event in events:
            if isinstance(event, Put):
                key = event.item.key
                self.items[key] = event.item
            else:
                key = event.key
                self.items.pop(key, None)
            for watch in self._watches:
                if watch.has_begun and key.startswith(watch.prefix):
                    watch.events.put_nowait(event)
        if version:
            self.version = version
            for watch in self._watches:
                self._begin(watch)

    def forget(self) -> None:
        """Have watches that begin wait for ``replace``: changes are being missed."""
        self.is_known = False
        for watch in self._watches:
            watch.since = 0  # What is read from now on is newer.

    def fail(self, error: BaseException) -> None:
        """End the watches there are with an error; later ones may begin."""
        for watch in self._watches:
            watch.events.put_nowait(error)

    def close(self) -> None:
        """End every watch after what it has got, and let none begin."""
        self.is_closed = True
        for watch in self._watches:
            watch.events.put_nowait(None)

    def _begin(self, watch: _Watch) -> None:
        if self.is_known and not watch.has_begun and self.version >= watch.since:
            watch.has_begun = True
            watch.events.put_nowait(Snapshot(self.under(watch.prefix)))


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
