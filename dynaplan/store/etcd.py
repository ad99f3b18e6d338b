"""The key-value store and its leases in etcd, through its JSON gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from dynaplan.store.encoding import encoded, key_range, key_values
from dynaplan.store.etcd_gateway import NOT_FOUND, Gateway, Refused, endpoints_of, tls_of
from dynaplan.store.hub import ensure_identity
from dynaplan.store.model import KeyValue, Transaction, WatchEvent
from dynaplan.store.watch import Watch

Document = dict[str, Any]

IDENTITY_KEY = "/dynaplan/identity"


class EtcdStore:
    """etcd as ``dynaplan.store.port.KeyValueStore`` and ``LeaseKeeper``.

    Every call ends within three seconds; connections are made when they are first needed.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> EtcdStore:
        """The store at ``ETCD_ENDPOINTS``, as ``ETCD_AUTH_USERNAME`` if set; for TLS see ``tls_of``."""
        user = environ.get("ETCD_AUTH_USERNAME")
        credentials = (user, environ.get("ETCD_AUTH_PASSWORD", "")) if user else None
        return cls(Gateway(endpoints_of(environ), credentials=credentials, tls=tls_of(environ)))

    async def get(self, key: str) -> KeyValue | None:
        """The key, or None when it is absent."""
        answer = await self._gateway.call("/v3/kv/range", {"key": encoded(key)})
        items = key_values(answer)
        return items[0] if items else None

    async def list(self, prefix: str) -> tuple[KeyValue, ...]:
        """Every key under the prefix, in key order."""
        return key_values(await self._gateway.call("/v3/kv/range", key_range(prefix)))

    async def put(self, key: str, value: str, lease: int = 0) -> None:
        """Write the key; raises PermanentError when the lease does not exist."""
        await self._gateway.call("/v3/kv/put", _put(key, value, lease))

    async def delete(self, key: str) -> None:
        """Remove the key; nothing happens when it is absent."""
        await self._gateway.call("/v3/kv/deleterange", {"key": encoded(key)})

    async def commit(self, transaction: Transaction) -> bool:
        """Carry the transaction out as a whole; False when its expectation fails."""
        compares = [
            {"key": encoded(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
            for key, revision in transaction.expected.items()
        ]
        puts = [
            {"request_put": _put(key, value, transaction.lease)} for key, value in transaction.puts.items()
        ]
        deletes = [{"request_delete_range": {"key": encoded(key)}} for key in transaction.deletes]
        answer = await self._gateway.call("/v3/kv/txn", {"compare": compares, "success": [*puts, *deletes]})
        return bool(answer.get("succeeded", False))

    def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        """A Snapshot, then every change, without a gap, until the store is closed."""
        return Watch(self._gateway, key_range(prefix), self.identity).events()

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
        """End the lease and delete its keys; nothing happens when it no longer exists."""
        try:
            await self._gateway.call("/v3/lease/revoke", {"ID": str(lease)})
        except Refused as error:
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
        """Close every connection and end every watch."""
        await self._gateway.close()


def _put(key: str, value: str, lease: int) -> Document:
    return {"key": encoded(key), "value": encoded(value), "lease": str(lease)}
