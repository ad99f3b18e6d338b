"""The key-value store and its leases in NATS: ``dynaplan.store.port.Store`` on one bucket of JetStream.

1. **Lease.** A message that the server expires after its TTL; renewing it is writing it again.
2. **Key under a lease.** A header names the lease, and the key exists as long as the lease does, whatever is
   left of it in the bucket. So all keys of a lease end together, by one message.
3. **Transaction.** One atomic batch, each message of which states the last sequence that it expects; a key
   that is only read has a guard, an empty message that states it.
4. **Watch.** All watches of a process share one push consumer, which feeds a mirror of the bucket. When the
   consumer or one of its messages is lost, everything is read again and each watch gets a Snapshot.
5. **Sweep.** Keys whose lease has ended are deleted by whichever process is first.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from dynaplan.store.hub import WatchHub, ensure_identity
from dynaplan.store.model import Deleted, KeyValue, Put, Transaction, WatchEvent
from dynaplan.store.nats_bucket import (
    GUARD,
    IDENTITY,
    MAX_NAME_BYTES,
    BucketMessage,
    Conflict,
    Entry,
    JetStreamBucket,
    JetStreamRefusal,
    decode_key,
    encode_key,
    guard,
    lease_message,
    lease_name,
    parse_lease_name,
    put_message,
    subject_filter,
    tombstone,
)
from dynaplan.store.nats_connection import connect_options
from dynaplan.store.timing import (
    BUCKET_CONFLICT_RETRY_S,
    BUCKET_HEARTBEAT_S,
    BUCKET_LEASE_GRACE_S,
    BUCKET_SILENCE_S,
    BUCKET_SWEEP_MAX_S,
    BUCKET_WATCH_RETRY_MAX_S,
    WATCH_RETRY_MIN_S,
)
from dynaplan.util.backoff import Backoff, jittered_sleep
from dynaplan.util.errors import PermanentError, QueueUnavailable, StoreUnavailable
from dynaplan.util.tasks import BackgroundTasks

if TYPE_CHECKING:
    from nats.aio.msg import Msg

LEASE_BITS = 62


@dataclass
class _Renewal:
    """The last renewal of a lease by this process: its message, its time to live, when it was sent."""

    sequence: int
    ttl_s: int
    sent_s: float
    mark: str


class NatsStore:
    """A bucket of JetStream as ``dynaplan.store.port.Store``; revisions are sequences of its stream.

    Every call ends within three seconds; connections are made when they are first needed.
    """

    def __init__(self, bucket: JetStreamBucket) -> None:
        self._bucket = bucket
        self._follower = BucketWatcher(bucket)
        self._renewals: dict[int, _Renewal] = {}
        self._mark = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> NatsStore:
        """The store at ``NATS_SERVER``, with the credentials of ``NatsConnection.from_environment``."""
        # Else it would be imported within the time of the first call.
        import_module("dynaplan.store.nats_client")
        return cls(JetStreamBucket(connect_options(environ)))

    async def get(self, key: str) -> KeyValue | None:
        return (await self._read(key))[0]

    async def list(self, prefix: str) -> tuple[KeyValue, ...]:
        entries = await self._bucket.read_all(subject_filter(prefix))
        items = [item for entry in entries if (item := entry.item) and item.key.startswith(prefix)]
        leases = {item.lease for item in items if item.lease}
        alive = {lease for lease in leases if await self._lease_exists(lease)}
        there = [item for item in items if not item.lease or item.lease in alive]
        return tuple(sorted(there, key=lambda item: item.key))

    async def put(self, key: str, value: str, lease: int = 0) -> None:
        message = put_message(_name(key), value, lease)
        await self._require_lease(lease)
        await self._bucket.write(message)

    async def delete(self, key: str) -> None:
        entry = await self._bucket.read(_name(key))
        if entry is not None and not entry.is_gone:
            await self._bucket.write(tombstone(_name(key)))

    async def commit(self, transaction: Transaction) -> bool:
        until_s = time.monotonic() + BUCKET_CONFLICT_RETRY_S
        while time.monotonic() < until_s:
            if transaction.puts:
                await self._require_lease(transaction.lease)
            last: dict[str, int] = {}
            for key, revision in transaction.expected.items():
                item, last[key] = await self._read(key)
                if (item.revision if item else 0) != revision:
                    return False
            try:
                await self._bucket.write_all(self._transaction_messages(transaction, last))
                return True
            except Conflict:
                # Somebody has changed a key, or the marker of a deleted one has expired: read again.
                continue
        raise StoreUnavailable("the keys of a transaction are being changed all the time")

    def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        return self._follower.events(prefix)

    async def grant(self, ttl_s: int) -> int:
        """Make a lease: one message that the server ends after ``ttl_s`` seconds unless it is renewed."""
        lease = secrets.randbits(LEASE_BITS) | 1
        await self._renew(lease, ttl_s, 0)
        return lease

    async def keep_alive(self, lease: int) -> float:
        """Renew the lease; its time to live in seconds, 0.0 when it no longer exists."""
        until_s = time.monotonic() + BUCKET_CONFLICT_RETRY_S
        renewal = self._renewals.get(lease)
        sequence, ttl_s = (renewal.sequence, renewal.ttl_s) if renewal else (0, 0)
        while time.monotonic() < until_s:
            if not sequence:
                entry = await self._bucket.read(lease_name(lease))
                if entry is None or entry.is_gone:
                    await self._check_expiry(lease, entry)
                    self._renewals.pop(lease, None)
                    return 0.0
                sequence, ttl_s = entry.sequence, entry.ttl_s
            try:
                await self._renew(lease, ttl_s, sequence)
                return float(ttl_s)
            except Conflict:
                sequence = 0
        raise StoreUnavailable(f"lease {lease:x} is being renewed by others all the time")

    async def revoke(self, lease: int) -> None:
        self._renewals.pop(lease, None)
        if await self._lease_exists(lease):
            await self._bucket.write(tombstone(lease_name(lease)))

    async def identity(self) -> str:
        """Return a random mark in the data itself, written by the first client that finds none."""

        async def read() -> str | None:
            entry = await self._bucket.read(IDENTITY)
            return None if entry is None or entry.is_gone else entry.data.decode(errors="replace")

        async def create(mark: str) -> None:
            last = await self._bucket.read(IDENTITY)
            if last is None or last.is_gone:
                with suppress(Conflict):
                    await self._bucket.write(
                        BucketMessage(IDENTITY, mark.encode()).expecting_last(last.sequence if last else 0)
                    )

        self._mark = await ensure_identity(read, create)
        return self._mark

    async def close(self) -> None:
        await self._follower.close()
        await self._bucket.close()

    def _transaction_messages(
        self, transaction: Transaction, last: Mapping[str, int]
    ) -> Sequence[BucketMessage]:
        """The messages of a transaction, each refused unless its key is as expected; see ``guard``."""
        puts = [put_message(_name(key), value, transaction.lease) for key, value in transaction.puts.items()]
        writes = dict(zip(transaction.puts, puts, strict=True))
        writes |= {key: tombstone(_name(key)) for key in transaction.deletes}
        guards = [
            guard(self._bucket.subject(_name(key)), sequence)
            for key, sequence in last.items()
            if key not in writes
        ]
        expecting = [each.expecting_last(last[key]) if key in last else each for key, each in writes.items()]
        return (*guards, *expecting)

    async def _renew(self, lease: int, ttl_s: int, sequence: int) -> None:
        sent_s = time.monotonic()
        written = await self._bucket.write(lease_message(lease, ttl_s).expecting_last(sequence))
        self._renewals[lease] = _Renewal(written, ttl_s, sent_s, self._mark)

    async def _check_expiry(self, lease: int, last: Entry | None) -> None:
        """Raise StoreUnavailable for a lease that ended before its time without having been revoked.

        The server computes expiry by the time of day: when that is set forward, all leases end at once. A
        lease that is gone before its time would be taken for revoked, and its worker would drain.
        """
        renewal = self._renewals.get(lease)
        if renewal is None or not renewal.mark or (last is not None and last.is_deleted):
            return
        if time.monotonic() < renewal.sent_s + renewal.ttl_s and await self.identity() == renewal.mark:
            raise StoreUnavailable(f"lease {lease:x} has ended before its time: the server's clock was set")

    async def _read(self, key: str) -> tuple[KeyValue | None, int]:
        """The key as it is now, and the sequence of its last message, be it a mark; 0 without one."""
        entry = await self._bucket.read(_name(key))
        if entry is None:
            return None, 0
        item = entry.item
        if item is not None and item.lease and not await self._lease_exists(item.lease):
            item = None
        return item, entry.sequence

    async def _lease_exists(self, lease: int) -> bool:
        entry: Entry | None = await self._bucket.read(lease_name(lease))
        return entry is not None and not entry.is_gone

    async def _require_lease(self, lease: int) -> None:
        if lease and not await self._lease_exists(lease):
            raise JetStreamRefusal(f"lease {lease:x} does not exist")


def _name(key: str) -> str:
    """The key's name in the bucket; raises PermanentError for a key that is too long for NATS."""
    name = encode_key(key)
    if len(name) > MAX_NAME_BYTES:
        raise PermanentError(f"a key of {len(name)} bytes is longer than NATS allows: {key[:60]!r}...")
    return name


Change = Put | Deleted


class BucketMirror:
    """The keys of the bucket, by its messages in the order of writing.

    A key whose lease does not live is no key; its message is remembered in ``orphans``, by name, until it is
    deleted or written again, or the lease turns out to exist: the keys of a lease that was renewed before
    its grant was read come first. ``leases`` holds the time to live of each valid lease, in seconds,
    ``sequence`` is that of the last message taken in.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.leases: dict[int, int] = {}
        self.orphans: dict[str, Entry] = {}
        self.items: dict[str, KeyValue] = {}
        self._leased: dict[int, dict[str, Entry]] = {}
        self.sequence = 0
        whole = sorted(entries, key=lambda entry: entry.sequence)
        # A lease that was renewed since stands behind its keys.
        for entry in (*(each for each in whole if parse_lease_name(each.name)), *whole):
            for _ in self._changes(entry):
                pass
        self.sequence = whole[-1].sequence if whole else 0

    def apply(self, entry: Entry) -> list[Change]:
        """Take the message in; return what it changes. One that is known already changes nothing."""
        if entry.sequence <= self.sequence:
            return []
        self.sequence = entry.sequence
        return list(self._changes(entry))

    def end(self, lease: int) -> list[Change]:
        """End the lease; return the end of its keys, in the order in which they were written."""
        self.leases.pop(lease, None)
        ended = sorted(self._leased.pop(lease, {}).values(), key=lambda entry: entry.sequence)
        self.orphans |= {entry.name: entry for entry in ended}
        return [event for entry in ended for event in self._without(entry.name)]

    def _changes(self, entry: Entry) -> Iterator[Change]:
        lease = parse_lease_name(entry.name)
        if lease is None:
            yield from self._changes_of_key(entry)
        elif entry.is_gone:
            yield from self.end(lease)
        else:
            is_new = lease not in self.leases
            self.leases[lease] = entry.ttl_s
            early = [each for each in self.orphans.values() if each.lease == lease] if is_new else ()
            for each in early:
                yield from self._changes_of_key(each)

    def _changes_of_key(self, entry: Entry) -> Iterator[Change]:
        self.orphans.pop(entry.name, None)
        item = entry.item
        if item is None or (item.lease and item.lease not in self.leases):
            if item is not None:
                self.orphans[entry.name] = entry
            yield from self._without(entry.name)
            return
        before = self.items.get(item.key)
        if before is not None and before.lease != item.lease:
            self._leased.get(before.lease, {}).pop(entry.name, None)
        if item.lease:
            self._leased.setdefault(item.lease, {})[entry.name] = entry
        self.items[item.key] = item
        yield Put(item)

    def _without(self, name: str) -> Iterator[Change]:
        """Remove the key with that name, if there is one."""
        key = decode_key(name)
        before = None if key is None else self.items.pop(key, None)
        if before is not None:
            self._leased.get(before.lease, {}).pop(name, None)
            yield Deleted(before.key)


log = logging.getLogger(__name__)


class BucketWatcher:
    """Feeds the watches of one process, from the first one until it is closed."""

    def __init__(self, bucket: JetStreamBucket) -> None:
        self._bucket = bucket
        self._hub = WatchHub()
        self._mirror: BucketMirror | None = None
        self._renewed_at_s: dict[int, float] = {}
        self._messages: asyncio.Queue[Msg | None] = asyncio.Queue()
        self._connected = asyncio.Event()
        self._pause = jittered_sleep(self._connected)
        self._tasks = BackgroundTasks()
        self._task: asyncio.Task[None] | None = None
        bucket.connection.on_reconnect(self._on_connected)

    async def events(self, prefix: str) -> AsyncGenerator[WatchEvent]:
        since = 0
        if self._task is not None and not self._task.done():
            since = await self._current_sequence()
        if (self._task is None or self._task.done()) and not self._hub.is_closed:
            self._task = asyncio.create_task(self._run(), name="watch of the bucket")
        async with aclosing(self._hub.watch(prefix, since)) as events:
            async for event in events:
                yield event

    async def _current_sequence(self) -> int:
        """Return a sequence above that of everything written by now, by any process.

        The mirror may lag behind, and a watch that starts after a write has to include it.
        """
        backoff = Backoff(WATCH_RETRY_MIN_S, BUCKET_WATCH_RETRY_MAX_S, self._pause)
        while not self._hub.is_closed:
            try:
                return await self._bucket.write(BucketMessage(GUARD))
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
        backoff = Backoff(WATCH_RETRY_MIN_S, BUCKET_WATCH_RETRY_MAX_S, self._pause)
        while True:
            try:
                await self._run_session(backoff)
            except StoreUnavailable as error:
                log.debug("watch interrupted: %s", error)
            except Exception as error:
                self._hub.fail(error)
                return
            finally:
                self._mirror = None
                self._hub.invalidate()
            await backoff.pause()

    async def _run_session(self, backoff: Backoff) -> None:
        """Follow the bucket until its consumer is lost."""
        messages: asyncio.Queue[Msg | None] = asyncio.Queue()

        async def receive(message: Msg) -> None:
            messages.put_nowait(message)

        async with self._bucket.call() as client:
            inbox = client.new_inbox()
            subscription = await client.subscribe(inbox, cb=receive)
        self._hub.invalidate()
        # From here on a new connection ends the session.
        self._messages = messages
        self._connected.clear()
        try:
            await self._bucket.follow(inbox, BUCKET_HEARTBEAT_S)
            self._start_mirror(BucketMirror(await self._bucket.read_all(">")))
            backoff.reset()
            await self._read(messages)
        finally:
            # After an error of the server the connection has a new client, and this is of a closed one.
            with suppress(QueueUnavailable):
                async with self._bucket.connection.call():
                    await subscription.unsubscribe()

    def _start_mirror(self, mirror: BucketMirror) -> None:
        self._mirror = mirror
        self._renewed_at_s = dict.fromkeys(mirror.leases, time.monotonic())
        self._hub.replace(mirror.items.values(), mirror.sequence)
        self._schedule_sweep()

    async def _read(self, messages: asyncio.Queue[Msg | None]) -> None:
        """Apply what the consumer sends; return when a message is missing, or the consumer falls silent."""
        expected = 1
        next_check_s = time.monotonic() + BUCKET_HEARTBEAT_S
        while True:
            try:
                async with asyncio.timeout(BUCKET_SILENCE_S):
                    message = await messages.get()
            except TimeoutError:
                return
            if message is None:
                return
            headers = message.headers or {}
            if headers.get("Status"):
                # Flow control is answered when everything before it has been applied.
                if reply := message.reply or headers.get("Nats-Consumer-Stalled"):
                    await self._parse_answer(reply)
                if int(headers.get("Nats-Last-Consumer", expected - 1)) != expected - 1:
                    return
            else:
                if int(message.reply.split(".")[-3]) != expected:
                    return
                expected += 1
                self._apply_message(message)
            if time.monotonic() >= next_check_s:
                next_check_s = time.monotonic() + BUCKET_HEARTBEAT_S
                await self._check_leases()

    def _apply_message(self, message: Msg) -> None:
        assert self._mirror is not None
        entry = self._bucket.entry(message)
        self._hub.apply(self._mirror.apply(entry), self._mirror.sequence)
        lease = parse_lease_name(entry.name)
        if lease in self._mirror.leases:
            self._renewed_at_s[lease] = time.monotonic()
        elif lease is not None:
            self._renewed_at_s.pop(lease, None)
            self._schedule_sweep()

    async def _check_leases(self) -> None:
        """End, in the mirror, the leases that were not renewed in time and that the bucket no longer has."""
        assert self._mirror is not None
        now_s = time.monotonic()
        for lease, ttl_s in list(self._mirror.leases.items()):
            if now_s - self._renewed_at_s.get(lease, now_s) <= ttl_s + BUCKET_LEASE_GRACE_S:
                continue
            entry = await self._bucket.read(lease_name(lease))
            if entry is None or entry.is_gone:
                self._hub.apply(self._mirror.end(lease))
                self._schedule_sweep()

    async def _parse_answer(self, reply: str) -> None:
        async with self._bucket.call() as client:
            await client.publish(reply, b"")

    def _schedule_sweep(self) -> None:
        if self._mirror is not None and self._mirror.orphans and not self._tasks:
            self._tasks.spawn(self._sweep(), "sweep")

    async def _sweep(self) -> None:
        """Delete the keys whose lease has ended, unless somebody is faster, until there are none."""
        while self._mirror is not None and self._mirror.orphans:
            await asyncio.sleep(random.uniform(0.2, 1.0) * BUCKET_SWEEP_MAX_S)
            mirror = self._mirror
            for entry in list(mirror.orphans.values()) if mirror else ():
                if mirror and mirror is self._mirror and mirror.orphans.get(entry.name) is entry:
                    try:
                        await self._delete_orphan(entry)
                    except (StoreUnavailable, PermanentError) as error:
                        log.debug("the keys of ended leases stay for now: %s", error)
                        return

    async def _delete_orphan(self, entry: Entry) -> None:
        """Delete the key, unless it has changed since or its lease exists after all."""
        lease = await self._bucket.read(lease_name(entry.lease))
        if lease is None or lease.is_gone:
            with suppress(Conflict):
                await self._bucket.write(tombstone(entry.name).expecting_last(entry.sequence))

    def _on_connected(self) -> None:
        self._connected.set()
        self._messages.put_nowait(None)
