"""All watches of one process on a bucket: one consumer of the server feeds them.

Between two connections nothing is told; then everything is read anew, and each watch gets a Snapshot.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from dynaplan.store.hub import WatchHub
from dynaplan.store.model import WatchEvent
from dynaplan.store.nats_kv.bucket import Conflict, JetStreamBucket
from dynaplan.store.nats_kv.messages import Draft, Entry, tombstone
from dynaplan.store.nats_kv.mirror import Mirror
from dynaplan.store.nats_kv.subjects import GUARD, lease_name, lease_of
from dynaplan.util.backoff import Backoff, jittered_sleep
from dynaplan.util.errors import PermanentError, StoreUnavailable
from dynaplan.util.tasks import BackgroundTasks

if TYPE_CHECKING:
    from nats.aio.msg import Msg

log = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
# A consumer that was silent this long is gone: the bucket was deleted, or the server has forgotten it.
SILENCE_S = 2.5 * HEARTBEAT_S
FIRST_DELAY_S = 0.05
LAST_DELAY_S = 1.0
# The server marks the end of a lease for a second only: a lease that was not renewed this much after its end
# is asked for, in case the mark was missed.
LEASE_GRACE_S = 2.0
# Several processes see a lease end; one of them deletes its keys, the others see that it is done.
SWEEP_AFTER_S = 0.25


class BucketFollower:
    """Follows the bucket from the first watch on, until it is closed."""

    def __init__(self, bucket: JetStreamBucket) -> None:
        self._bucket = bucket
        self._hub = WatchHub()
        self._mirror: Mirror | None = None
        self._renewed_s: dict[int, float] = {}
        self._messages: asyncio.Queue[Msg | None] = asyncio.Queue()
        self._connected = asyncio.Event()
        self._pause = jittered_sleep(self._connected)
        self._tasks = BackgroundTasks()
        self._task: asyncio.Task[None] | None = None
        bucket.messenger.on_reconnect(self._on_connected)

    async def events(self, prefix: str) -> AsyncGenerator[WatchEvent]:
        """A Snapshot, then every change, until the follower is closed."""
        since = 0
        if self._task is not None and not self._task.done():
            since = await self._present()
        if (self._task is None or self._task.done()) and not self._hub.is_closed:
            self._task = asyncio.create_task(self._run(), name="watch of the bucket")
        async with aclosing(self._hub.watch(prefix, since)) as events:
            async for event in events:
                yield event

    async def _present(self) -> int:
        """Return a sequence behind everything that any process has written by now.

        The mirror may lag behind, and a watch that begins after a write has to tell of it.
        """
        backoff = Backoff(FIRST_DELAY_S, LAST_DELAY_S, self._pause)
        while not self._hub.is_closed:
            try:
                return await self._bucket.write(Draft(GUARD))
            except StoreUnavailable as error:
                log.debug("a watch cannot begin yet: %s", error)
            await backoff.pause()
        return 0

    async def close(self) -> None:
        """End every watch, and the one consumer that they share."""
        self._hub.close()
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._tasks.cancel()

    async def _run(self) -> None:
        backoff = Backoff(FIRST_DELAY_S, LAST_DELAY_S, self._pause)
        while True:
            try:
                await self._session(backoff)
            except StoreUnavailable as error:
                log.debug("watch interrupted: %s", error)
            except PermanentError as error:
                self._hub.fail(error)
                return
            finally:
                self._mirror = None
                self._hub.forget()
            await backoff.pause()

    async def _session(self, backoff: Backoff) -> None:
        """Follow the bucket until its consumer is lost."""
        messages: asyncio.Queue[Msg | None] = asyncio.Queue()

        async def receive(message: Msg) -> None:
            messages.put_nowait(message)

        async with self._bucket.call() as client:
            inbox = client.new_inbox()
            subscription = await client.subscribe(inbox, cb=receive)
        self._hub.forget()
        # From here on a new connection ends the session.
        self._messages = messages
        self._connected.clear()
        try:
            await self._bucket.follow(inbox, HEARTBEAT_S)
            self._begin(Mirror(await self._bucket.read_all(">")))
            backoff.reset()
            await self._read(messages)
        finally:
            if self._bucket.messenger.is_connected:
                await subscription.unsubscribe()

    def _begin(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._renewed_s = dict.fromkeys(mirror.leases, time.monotonic())
        self._hub.replace(mirror.items.values(), mirror.sequence)
        self._sweep_soon()

    async def _read(self, messages: asyncio.Queue[Msg | None]) -> None:
        """Take in what the consumer sends; return when something of it is lost."""
        expected = 1
        next_look_s = time.monotonic() + HEARTBEAT_S
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    message = await messages.get()
            except TimeoutError:
                return
            if message is None:
                return
            headers = message.headers or {}
            if headers.get("Status"):
                # Flow control is answered when everything before it is taken in.
                if reply := message.reply or headers.get("Nats-Consumer-Stalled"):
                    await self._answer(reply)
                if int(headers.get("Nats-Last-Consumer", expected - 1)) != expected - 1:
                    return
            else:
                if int(message.reply.split(".")[-3]) != expected:
                    return
                expected += 1
                self._take(message)
            if time.monotonic() >= next_look_s:
                next_look_s = time.monotonic() + HEARTBEAT_S
                await self._look_for_ended_leases()

    def _take(self, message: Msg) -> None:
        assert self._mirror is not None
        entry = self._bucket.entry(message)
        self._hub.apply(self._mirror.apply(entry), self._mirror.sequence)
        lease = lease_of(entry.name)
        if lease in self._mirror.leases:
            self._renewed_s[lease] = time.monotonic()
        elif lease is not None:
            self._renewed_s.pop(lease, None)
            self._sweep_soon()

    async def _look_for_ended_leases(self) -> None:
        """Ask for the leases that were not renewed in time."""
        assert self._mirror is not None
        now_s = time.monotonic()
        for lease, ttl_s in list(self._mirror.leases.items()):
            if now_s - self._renewed_s.get(lease, now_s) <= ttl_s + LEASE_GRACE_S:
                continue
            entry = await self._bucket.read(lease_name(lease))
            if entry is None or entry.is_gone:
                self._hub.apply(self._mirror.end(lease))
                self._sweep_soon()

    async def _answer(self, reply: str) -> None:
        async with self._bucket.call() as client:
            await client.publish(reply, b"")

    def _sweep_soon(self) -> None:
        if self._mirror is not None and self._mirror.orphans and not self._tasks:
            self._tasks.spawn(self._sweep(), "sweep")

    async def _sweep(self) -> None:
        """Delete the keys whose lease has ended, unless somebody is faster, until there are none."""
        while self._mirror is not None and self._mirror.orphans:
            await asyncio.sleep(random.uniform(0.2, 1.0) * SWEEP_AFTER_S)
            mirror = self._mirror
            for entry in list(mirror.orphans.values()) if mirror else ():
                if mirror and mirror is self._mirror and mirror.orphans.get(entry.name) is entry:
                    try:
                        await self._delete_orphan(entry)
                    except (StoreUnavailable, PermanentError) as error:
                        log.debug("the keys of ended leases stay for now: %s", error)
                        return

    async def _delete_orphan(self, entry: Entry) -> None:
        """Delete the key as it was then; a lease that lives after all will be told of, and keeps it."""
        lease = await self._bucket.read(lease_name(entry.lease))
        if lease is None or lease.is_gone:
            with suppress(Conflict):
                await self._bucket.write(tombstone(entry.name).if_last(entry.sequence))

    def _on_connected(self) -> None:
        self._connected.set()
        self._messages.put_nowait(None)
