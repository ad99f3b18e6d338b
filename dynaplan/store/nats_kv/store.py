"""The key-value store and its leases in NATS: ``dynaplan.store.port.Store`` on one bucket of JetStream.

A lease is a message that the server ends after its time; to renew it is to write it again. A key under a
lease names it in a header, and is a key as long as the lease lives, whatever is left of it in the bucket. So
all keys of a lease end together, by one message.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module

from dynaplan.store.hub import ensure_identity
from dynaplan.store.model import KeyValue, Transaction, WatchEvent
from dynaplan.store.nats_connection import options_of
from dynaplan.store.nats_kv.bucket import Conflict, JetStreamBucket, JetStreamRefusal
from dynaplan.store.nats_kv.follower import BucketFollower
from dynaplan.store.nats_kv.messages import Draft, Entry, guard, lease_draft, tombstone, value_draft
from dynaplan.store.nats_kv.subjects import IDENTITY, LONGEST_NAME_BYTES, filter_of, lease_name, name_of
from dynaplan.util.errors import PermanentError, StoreUnavailable

LEASE_BITS = 62
# The store answers within three seconds, also where others change the same keys all the time.
TRY_FOR_S = 2.5


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
        self._follower = BucketFollower(bucket)
        self._renewals: dict[int, _Renewal] = {}
        self._mark = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> NatsStore:
        """The store at ``NATS_SERVER``, signed in as the messenger is."""
        # Else it would be imported within the time of the first call.
        import_module("nats.aio.client")
        return cls(JetStreamBucket(options_of(environ)))

    async def get(self, key: str) -> KeyValue | None:
        """The key, or None when it is absent."""
        return (await self._read(key))[0]

    async def list(self, prefix: str) -> tuple[KeyValue, ...]:
        """Every key under the prefix, in key order."""
        entries = await self._bucket.read_all(filter_of(prefix))
        items = [item for entry in entries if (item := entry.item) and item.key.startswith(prefix)]
        leases = {item.lease for item in items if item.lease}
        alive = {lease for lease in leases if await self._lives(lease)}
        there = [item for item in items if not item.lease or item.lease in alive]
        return tuple(sorted(there, key=lambda item: item.key))

    async def put(self, key: str, value: str, lease: int = 0) -> None:
        """Write the key; raises PermanentError when the lease does not exist."""
        draft = value_draft(_name(key), value, lease)
        await self._must_live(lease)
        await self._bucket.write(draft)

    async def delete(self, key: str) -> None:
        """Remove the key; nothing happens when it is absent."""
        entry = await self._bucket.read(_name(key))
        if entry is not None and not entry.is_gone:
            await self._bucket.write(tombstone(_name(key)))

    async def commit(self, transaction: Transaction) -> bool:
        """Carry the transaction out as a whole; False when its expectation fails."""
        until_s = time.monotonic() + TRY_FOR_S
        while time.monotonic() < until_s:
            if transaction.puts:
                await self._must_live(transaction.lease)
            last: dict[str, int] = {}
            for key, revision in transaction.expected.items():
                item, last[key] = await self._read(key)
                if (item.revision if item else 0) != revision:
                    return False
            try:
                await self._bucket.write_all(self._drafts(transaction, last))
                return True
            except Conflict:
                # Somebody has changed a key, or a mark of a deleted one has vanished: look again.
                continue
        raise StoreUnavailable("the keys of a transaction are being changed all the time")

    def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        """A Snapshot, then every change, without a gap, until the store is closed."""
        return self._follower.events(prefix)

    async def grant(self, ttl_s: int) -> int:
        """Make a lease: one message that the server ends after ``ttl_s`` seconds unless it is renewed."""
        lease = secrets.randbits(LEASE_BITS) | 1
        await self._renew(lease, ttl_s, 0)
        return lease

    async def keep_alive(self, lease: int) -> float:
        """Renew the lease; its time to live in seconds, 0.0 when it no longer exists."""
        until_s = time.monotonic() + TRY_FOR_S
        renewal = self._renewals.get(lease)
        sequence, ttl_s = (renewal.sequence, renewal.ttl_s) if renewal else (0, 0)
        while time.monotonic() < until_s:
            if not sequence:
                entry = await self._bucket.read(lease_name(lease))
                if entry is None or entry.is_gone:
                    await self._must_have_ended(lease, entry)
                    return 0.0
                sequence, ttl_s = entry.sequence, entry.ttl_s
            try:
                await self._renew(lease, ttl_s, sequence)
                return float(ttl_s)
            except Conflict:
                sequence = 0
        raise StoreUnavailable(f"lease {lease:x} is being renewed by others all the time")

    async def revoke(self, lease: int) -> None:
        """End the lease and with it its keys; nothing happens when it no longer exists."""
        if await self._lives(lease):
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
                        Draft(IDENTITY, mark.encode()).if_last(last.sequence if last else 0)
                    )

        self._mark = await ensure_identity(read, create)
        return self._mark

    async def close(self) -> None:
        """Close the connection and end every watch."""
        await self._follower.close()
        await self._bucket.close()

    def _drafts(self, transaction: Transaction, last: Mapping[str, int]) -> Sequence[Draft]:
        """The messages of a transaction, each refused unless its key is as expected; see ``guard``."""
        puts = [value_draft(_name(key), value, transaction.lease) for key, value in transaction.puts.items()]
        writes = dict(zip(transaction.puts, puts, strict=True))
        writes |= {key: tombstone(_name(key)) for key in transaction.deletes}
        guards = [
            guard(self._bucket.subject(_name(key)), sequence)
            for key, sequence in last.items()
            if key not in writes
        ]
        expecting = [draft.if_last(last[key]) if key in last else draft for key, draft in writes.items()]
        return (*guards, *expecting)

    async def _renew(self, lease: int, ttl_s: int, sequence: int) -> None:
        sent_s = time.monotonic()
        written = await self._bucket.write(lease_draft(lease, ttl_s).if_last(sequence))
        self._renewals[lease] = _Renewal(written, ttl_s, sent_s, self._mark)

    async def _must_have_ended(self, lease: int, last: Entry | None) -> None:
        """Raise StoreUnavailable for a lease that ended before its time without having been revoked.

        The server reckons with the time of day: where that was set forward, everybody's leases end at once.
        A lease that is gone before its time would be taken for revoked, and its worker would leave.
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
        if item is not None and item.lease and not await self._lives(item.lease):
            item = None
        return item, entry.sequence

    async def _lives(self, lease: int) -> bool:
        entry: Entry | None = await self._bucket.read(lease_name(lease))
        return entry is not None and not entry.is_gone

    async def _must_live(self, lease: int) -> None:
        if lease and not await self._lives(lease):
            raise JetStreamRefusal(f"lease {lease:x} does not exist")


def _name(key: str) -> str:
    """The key's name in the bucket; raises PermanentError for a key that is too long for NATS."""
    name = name_of(key)
    if len(name) > LONGEST_NAME_BYTES:
        raise PermanentError(f"a key of {len(name)} bytes is longer than NATS allows: {key[:60]!r}...")
    return name
