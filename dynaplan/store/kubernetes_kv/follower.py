"""Follows the objects of a store in a cluster's API, and feeds the hub of this process's watches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from dynaplan.store.hub import WatchHub
from dynaplan.store.kubernetes_client import KubernetesClient
from dynaplan.store.kubernetes_kv.objects import ClusterObjects, ObjectKind
from dynaplan.store.kubernetes_kv.picture import ClusterPicture
from dynaplan.store.model import WatchEvent
from dynaplan.util.backoff import Backoff
from dynaplan.util.errors import ClusterExpired, DynaplanError
from dynaplan.util.tasks import BackgroundTasks

log = logging.getLogger(__name__)

FIRST_DELAY_S, LAST_DELAY_S = 0.05, 2.0

SHORT_S = 1.0
"""A watch that ends earlier than this is begun again after a pause."""


class ClusterFollower:
    """Follows the three kinds of objects from the first watch on.

    While the API server is away the last known keys stay; when it is back, watches get the differences.
    """

    def __init__(self, client: KubernetesClient, pod: str) -> None:
        self._client = client
        self._pod = pod
        self._objects = ClusterObjects()
        self._picture = ClusterPicture()
        self._hub = WatchHub()
        self._connected: set[int] = set()
        self._waited_for: set[str] = set()
        self._tasks = BackgroundTasks(lambda _, error: self._hub.fail(error))

    @property
    def current(self) -> ClusterPicture | None:
        """Return what is known, some milliseconds old; None while the API server is not being followed."""
        is_whole = self._hub.is_known and len(self._connected) == len(self._objects.kinds)
        return self._picture if is_whole else None

    async def events(self, prefix: str) -> AsyncGenerator[WatchEvent]:
        """Yield a Snapshot, then every change, until closed."""
        if not len(self._tasks) and not self._hub.is_closed:
            for kind in self._objects.kinds:
                self._tasks.spawn(self._follow(kind), f"watch {kind.resources[0].plural}")
        elif self._hub.is_known:
            await self._catch_up()
        async with aclosing(self._hub.watch(prefix)) as events:
            async for event in events:
                yield event

    async def close(self) -> None:
        """End every watch, and ask the API server for nothing more."""
        self._hub.close()
        await self._tasks.cancel()

    async def _catch_up(self) -> None:
        """Know all that was written before now; where that fails, what is known has to do."""
        try:
            await self._objects.refresh(self._client)
            self._connected.update(id(kind) for kind in self._objects.kinds)
        except DynaplanError as error:
            log.debug("a watch begins with what is known: %s", error)
        self._update()

    async def _follow(self, kind: ObjectKind) -> None:
        backoff = Backoff(FIRST_DELAY_S, LAST_DELAY_S)
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            try:
                await self._watch(kind, backoff)
                if loop.time() - began_s >= SHORT_S:
                    backoff.reset()
                    continue
            except ClusterExpired as error:
                log.debug("listing again: %s", error)
                kind.version = 0
            except DynaplanError as error:
                if self.current or (backoff.is_first and not self._hub.is_known):
                    log.warning("what is known of the cluster stays as it is: %s", error)
                self._connected.discard(id(kind))
                kind.version = 0
            await backoff.pause()

    async def _watch(self, kind: ObjectKind, backoff: Backoff) -> None:
        """List the objects unless their version is known, then follow them until the watch ends."""
        if not kind.version:
            items, version = await kind.listed(self._client)
            kind.replace(items, version)
            backoff.reset()
            self._connected.add(id(kind))
            self._update()
        changes = self._client.watch(kind.resources[0], kind.labels, str(kind.version), fields=kind.fields)
        async with aclosing(changes):
            async for change, found in changes:
                backoff.reset()
                kind.apply(change, found)
                self._update()

    def _update(self) -> None:
        """Give the hub what the objects say, once all three kinds are known."""
        if all(kind.is_known for kind in self._objects.kinds):
            self._picture = self._objects.picture
            self._hub.update(self._picture.seen_by(self._pod))
            self._log_pods_waited_for()

    def _log_pods_waited_for(self) -> None:
        waiting = set(self._picture.waiting()) - {self._pod}
        for name in sorted(waiting - self._waited_for):
            log.info("pod %s has registered and is not ready in any EndpointSlice: not used yet", name)
        self._waited_for = waiting
