"""A watch on etcd that neither loses a change nor ends when etcd is away."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

from dynaplan.store.encoding import decoded, key_value, key_values
from dynaplan.store.etcd_gateway import Gateway
from dynaplan.store.model import Deleted, Put, Snapshot, WatchEvent
from dynaplan.util.backoff import Backoff, jittered_sleep
from dynaplan.util.errors import StoreUnavailable

Document = dict[str, Any]
log = logging.getLogger(__name__)

FIRST_DELAY_S = 0.05
LAST_DELAY_S = 2.0
# A watch that has been quiet this long is opened anew where it was: whatever has silently eaten its
# connection, no change is late by more than this. A connection whose other machine is gone is noticed
# earlier, by TCP.
SILENCE_S = 30.0


class Watch:
    """One watch on a range of keys.

    It remembers the revision it has told everything up to, and goes on from there after an outage. It
    begins with a new snapshot when that is impossible: etcd has dropped the history since
    (compaction), or it is another etcd now: another identity or cluster id, or a revision from before ours.
    """

    def __init__(
        self,
        gateway: Gateway,
        key_range: Document,
        identity: Callable[[], Awaitable[str]],
        *,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._gateway = gateway
        self._key_range = key_range
        self._identity = identity
        self._silence_s = silence_s
        self._next_revision = 0  # 0: a snapshot is needed
        self._cluster = ""
        self._mark = ""

    async def events(self) -> AsyncGenerator[WatchEvent]:
        """A Snapshot, then every change, until the gateway is closed."""
        backoff = Backoff(FIRST_DELAY_S, LAST_DELAY_S, jittered_sleep(self._gateway.closed))
        while not self._gateway.closed.is_set():
            try:
                if not self._next_revision:
                    yield await self._snapshot()
                async with self._gateway.stream("/v3/watch", self._request(), self._silence_s) as messages:
                    async for message in messages:
                        backoff.reset()
                        for event in self._read(message):
                            yield event
                        if message.get("created") and await self._identity() != self._mark:
                            self._next_revision = 0
                        if not self._next_revision:
                            break
            except StoreUnavailable as error:
                if self._gateway.closed.is_set():
                    return
                log.debug("watch interrupted: %s", error)
                await backoff.pause()

    async def _snapshot(self) -> Snapshot:
        self._mark = await self._identity()
        answer = await self._gateway.call("/v3/kv/range", self._key_range)
        self._cluster = answer["header"]["cluster_id"]
        self._next_revision = int(answer["header"]["revision"]) + 1
        return Snapshot(key_values(answer))

    def _request(self) -> Document:
        start = {"start_revision": str(self._next_revision), "progress_notify": True}
        return {"create_request": {**self._key_range, **start}}

    def _read(self, message: Document) -> Iterator[WatchEvent]:
        """The events of one message; marks a snapshot as needed when it says that we cannot go on."""
        header = message.get("header", {})
        revision = int(header.get("revision", 0))
        is_other_store = header.get("cluster_id", self._cluster) != self._cluster
        if message.get("canceled"):
            self._next_revision = 0
            raise StoreUnavailable(f"etcd ended the watch: {message.get('cancel_reason', message)}")
        elif message.get("created"):
            if is_other_store or revision < self._next_revision - 1:
                self._next_revision = 0
        else:
            changes = message.get("events", ())
            yield from (_event(change) for change in changes)
            # The header may be ahead of these events; without events it is a notice of progress.
            last = int(changes[-1]["kv"]["mod_revision"]) if changes else revision
            self._next_revision = max(self._next_revision, last + 1)


def _event(change: Document) -> WatchEvent:
    """A change as etcd describes it; PUT, being the default, is left out there."""
    if change.get("type") == "DELETE":
        return Deleted(decoded(change["kv"]["key"]))
    return Put(key_value(change["kv"]))
