"""The key-value store and its leases in etcd, through its JSON gateway.

A watch remembers the revision up to which it has delivered everything, and resumes there after an outage. It
starts over with a Snapshot when that is impossible: etcd has dropped the history since (compaction), or it is
another etcd now, with another identity or cluster id, or a revision from before ours.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from dynaplan.store.etcd_gateway import (
    NOT_FOUND,
    EtcdGateway,
    EtcdRefusal,
    decode,
    encode,
    key_range,
    key_value,
    key_values,
    parse_endpoints,
    tls_context,
)
from dynaplan.store.hub import ensure_identity
from dynaplan.store.model import Deleted, KeyValue, Put, Snapshot, Transaction, WatchEvent
from dynaplan.store.timing import ETCD_WATCH_SILENCE_S, WATCH_RETRY_MAX_S, WATCH_RETRY_MIN_S
from dynaplan.util.backoff import Backoff, jittered_sleep
from dynaplan.util.errors import StoreUnavailable

Document = dict[str, Any]

IDENTITY_KEY = "/dynaplan/identity"


class EtcdStore:
    """etcd as ``dynaplan.store.port.KeyValueStore`` and ``LeaseStore``.

    Every call ends within three seconds; connections are made when they are first needed.
    """

    def __init__(self, gateway: EtcdGateway) -> None:
        self._gateway = gateway

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> EtcdStore:
        """The store at ``ETCD_ENDPOINTS``, as ``ETCD_AUTH_USERNAME`` if set; for TLS see ``tls_context``."""
        user = environ.get("ETCD_AUTH_USERNAME")
        credentials = (user, environ.get("ETCD_AUTH_PASSWORD", "")) if user else None
        return cls(EtcdGateway(parse_endpoints(environ), credentials=credentials, tls=tls_context(environ)))

    async def get(self, key: str) -> KeyValue | None:
        answer = await self._gateway.call("/v3/kv/range", {"key": encode(key)})
        items = key_values(answer)
        return items[0] if items else None

    async def list(self, prefix: str) -> tuple[KeyValue, ...]:
        return key_values(await self._gateway.call("/v3/kv/range", key_range(prefix)))

    async def put(self, key: str, value: str, lease: int = 0) -> None:
        await self._gateway.call("/v3/kv/put", _put(key, value, lease))

    async def delete(self, key: str) -> None:
        await self._gateway.call("/v3/kv/deleterange", {"key": encode(key)})

    async def commit(self, transaction: Transaction) -> bool:
        compares = [
            {"key": encode(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
            for key, revision in transaction.expected.items()
        ]
        puts = [
            {"request_put": _put(key, value, transaction.lease)} for key, value in transaction.puts.items()
        ]
        deletes = [{"request_delete_range": {"key": encode(key)}} for key in transaction.deletes]
        answer = await self._gateway.call("/v3/kv/txn", {"compare": compares, "success": [*puts, *deletes]})
        return bool(answer.get("succeeded", False))

    def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        return EtcdWatch(self._gateway, key_range(prefix), self.identity).events()

    async def grant(self, ttl_s: int) -> int:
        """A new lease. etcd makes a TTL at least as long as its own election (2 s for the embedded one)."""
        answer = await self._gateway.call("/v3/lease/grant", {"TTL": str(ttl_s)})
        return int(answer["ID"])

    async def keep_alive(self, lease: int) -> float:
        """Renew the lease; its time to live in seconds, 0.0 when it no longer exists."""
        answer = await self._gateway.call("/v3/lease/keepalive", {"ID": str(lease)})
        # A lease that is gone is answered without a TTL, not with an error.
        return float(answer.get("TTL", 0.0))

    async def revoke(self, lease: int) -> None:
        try:
            await self._gateway.call("/v3/lease/revoke", {"ID": str(lease)})
        except EtcdRefusal as error:
            if error.code != NOT_FOUND:
                raise

    async def identity(self) -> str:
        """Return a random mark in the data itself, written by the first client that finds none.

        The cluster's id would not do: an etcd that comes back with an empty disk has the same one.
        """

        async def read() -> str | None:
            item = await self.get(IDENTITY_KEY)
            return item.value if item else None

        async def create(mark: str) -> None:
            await self.commit(Transaction(expected={IDENTITY_KEY: 0}, puts={IDENTITY_KEY: mark}))

        return await ensure_identity(read, create)

    async def close(self) -> None:
        await self._gateway.close()


def _put(key: str, value: str, lease: int) -> Document:
    return {"key": encode(key), "value": encode(value), "lease": str(lease)}


log = logging.getLogger(__name__)


class EtcdWatch:
    def __init__(
        self,
        gateway: EtcdGateway,
        key_range: Document,
        identity: Callable[[], Awaitable[str]],
        *,
        silence_s: float = ETCD_WATCH_SILENCE_S,
    ) -> None:
        self._gateway = gateway
        self._key_range = key_range
        self._identity = identity
        self._silence_s = silence_s
        self._next_revision = 0  # 0: a snapshot is needed
        self._cluster_id = ""
        self._store_identity = ""

    async def events(self) -> AsyncGenerator[WatchEvent]:
        """Yield a Snapshot, then every change, until the gateway is closed."""
        backoff = Backoff(WATCH_RETRY_MIN_S, WATCH_RETRY_MAX_S, jittered_sleep(self._gateway.closed))
        while not self._gateway.closed.is_set():
            try:
                if not self._next_revision:
                    yield await self._snapshot()
                async with self._gateway.stream("/v3/watch", self._request(), self._silence_s) as messages:
                    async for message in messages:
                        backoff.reset()
                        for event in self._read(message):
                            yield event
                        if message.get("created") and await self._identity() != self._store_identity:
                            self._next_revision = 0
                        if not self._next_revision:
                            break
            except StoreUnavailable as error:
                if self._gateway.closed.is_set():
                    return
                log.debug("watch interrupted: %s", error)
                await backoff.pause()

    async def _snapshot(self) -> Snapshot:
        self._store_identity = await self._identity()
        answer = await self._gateway.call("/v3/kv/range", self._key_range)
        self._cluster_id = answer["header"]["cluster_id"]
        self._next_revision = int(answer["header"]["revision"]) + 1
        return Snapshot(key_values(answer))

    def _request(self) -> Document:
        start = {"start_revision": str(self._next_revision), "progress_notify": True}
        return {"create_request": {**self._key_range, **start}}

    def _read(self, message: Document) -> Iterator[WatchEvent]:
        """The events of one message; requests a new snapshot when the watch cannot resume."""
        header = message.get("header", {})
        revision = int(header.get("revision", 0))
        is_other_store = header.get("cluster_id", self._cluster_id) != self._cluster_id
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
        return Deleted(decode(change["kv"]["key"]))
    return Put(key_value(change["kv"]))
