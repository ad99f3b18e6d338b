"""Watches of the store in a cluster's API: one follower for a process, and a queue for each watch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from dynaplan.store.kubernetes_client import KubernetesClient
from dynaplan.store.kubernetes_kv.objects import ClusterObjects, ObjectKind
from dynaplan.store.kubernetes_kv.picture import ClusterPicture
from dynaplan.store.model import Deleted, KeyValue, Put, Snapshot, WatchEvent
from dynaplan.util.backoff import Backoff
from dynaplan.util.errors import ClusterExpired, DynaplanError
from dynaplan.util.tasks import BackgroundTasks

log = logging.getLogger(__name__)

FIRST_DELAY_S, LAST_DELAY_S = 0.05, 2.0

SHORT_S = 1.0
"""A watch that ends earlier than this is begun again after a pause."""


@dataclass(eq=False)
class _Watch:
    prefix: str
    events: asyncio.Queue[WatchEvent | BaseException | None] = field(default_factory=asyncio.Queue)

    def begin(self, seen: dict[str, KeyValue]) -> None:
        items = (item for key, item in seen.items() if key.startswith(self.prefix))
        self.events.put_nowait(Snapshot(tuple(items)))

    def tell(self, key: str, event: WatchEvent) -> None:
        if key.startswith(self.prefix):
            self.events.put_nowait(event)


class ClusterFollower:
    """Follows the three kinds of objects from the first watch on, and tells each watch what it sees.

    While the API server is away the last known keys stay; when it is back, the differences are told.
    """

    def __init__(self, client: KubernetesClient, pod: str) -> None:
        self._client = client
        self._pod = pod
        self._objects = ClusterObjects()
        self._picture = ClusterPicture()
        self._seen: dict[str, KeyValue] = {}
        self._watches: list[_Watch] = []
        self._connected: set[int] = set()
        self._waited_for: set[str] = set()
        self._tasks = BackgroundTasks(lambda _, error: self._end(error))
        self._is_known = self._is_closed = False

    @property
    def current(self) -> ClusterPicture | None:
        """Return what is known, some milliseconds old; None while the API server is not being followed."""
        is_whole = self._is_known and len(self._connected) == len(self._objects.kinds)
        return self._picture if is_whole else None

    async def events(self, prefix: str) -> AsyncGenerator[WatchEvent]:
        """Yield a Snapshot, then every change, until closed."""
        watch = _Watch(prefix)
        if not len(self._tasks) and not self._is_closed:
            for kind in self._objects.kinds:
                self._tasks.spawn(self._follow(kind), f"watch {kind.resources[0].plural}")
        elif self._is_known:
            await self._catch_up()
        if self._is_closed:
            return
        if self._is_known:
            watch.begin(self._seen)
        self._watches.append(watch)
        try:
            while (event := await watch.events.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            self._watches.remove(watch)

    async def close(self) -> None:
        """End every watch, as if it had come to its end, and ask the API server for nothing more."""
        self._is_closed = True
        await self._tasks.cancel()
        self._end(None)

    async def _catch_up(self) -> None:
        """Know all that was written before now; where that fails, what is known has to do."""
        try:
            await self._objects.refresh(self._client)
            self._connected.update(id(kind) for kind in self._objects.kinds)
        except DynaplanError as error:
            log.debug("a watch begins with what is known: %s", error)
        self._tell()

    async def _follow(self, kind: ObjectKind) -> None:
        backoff = Backoff(FIRST_DELAY_S, LAST_DELAY_S)
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            try:
                await self._watched(kind, backoff)
                if loop.time() - began_s >= SHORT_S:
                    backoff.reset()
                    continue
            except ClusterExpired as error:
                log.debug("listing again: %s", error)
                kind.version = 0
            except DynaplanError as error:
                if self.current or (backoff.is_first and not self._is_known):
                    log.warning("what is known of the cluster stays as it is: %s", error)
                self._connected.discard(id(kind))
                kind.version = 0
            await backoff.pause()

    async def _watched(self, kind: ObjectKind, backoff: Backoff) -> None:
        """List the objects unless their version is known, then follow them until the watch ends."""
        if not kind.version:
            items, version = await kind.listed(self._client)
            kind.replace(items, version)
            backoff.reset()
            self._connected.add(id(kind))
            self._tell()
        changes = self._client.watch(kind.resources[0], kind.labels, str(kind.version), fields=kind.fields)
        async with aclosing(changes):
            async for change, found in changes:
                backoff.reset()
                kind.apply(change, found)
                self._tell()

    def _tell(self) -> None:
        """Tell every watch what has changed since the last time."""
        if not all(kind.is_known for kind in self._objects.kinds):
            return
        before, self._picture = self._seen, self._objects.picture
        self._seen = self._picture.seen_by(self._pod)
        self._say_who_is_waited_for()
        if not self._is_known:
            self._is_known = True
            for watch in self._watches:
                watch.begin(self._seen)
            return
        events: dict[str, WatchEvent] = {key: Deleted(key) for key in before.keys() - self._seen.keys()}
        events |= {key: Put(item) for key, item in self._seen.items() if before.get(key) != item}
        for key, event in events.items():
            for watch in self._watches:
                watch.tell(key, event)

    def _say_who_is_waited_for(self) -> None:
        waiting = set(self._picture.waiting()) - {self._pod}
        for name in sorted(waiting - self._waited_for):
            log.info("pod %s has registered and is not ready in any EndpointSlice: not used yet", name)
        self._waited_for = waiting

    def _end(self, error: BaseException | None) -> None:
        for watch in self._watches:
            watch.events.put_nowait(error)
