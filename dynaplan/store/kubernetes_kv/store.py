"""The key-value store and its leases in a cluster's API: ``dynaplan.store.port.Store`` without a server.

=======================================  =========================================================
key                                      where it is
=======================================  =========================================================
under a lease, put without a condition   the ``DynamoWorkerMetadata`` of the lease's pod
any other                                the ConfigMap ``dynaplan-store``
=======================================  =========================================================

Each object is read, changed and written over the version that was read, so a write happens whole or not at
all, and a condition on a key is a condition on the ConfigMap. A key that is taken under a lease, as by a
lock, is there: it counts as long as the lease is in its pod's object. A pod's object is owned by the pod. So
its leases end with it, even unrevoked, and no lease is renewed by a write. What a pod has registered
is seen by others while an EndpointSlice calls the pod ready (docs/decisions/0003).
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from dynaplan.store.kubernetes_client import CONFIG_MAPS, KubernetesClient, Object
from dynaplan.store.kubernetes_kv.documents import (
    WORKER_METADATA,
    HeldLease,
    PodIdentity,
    PodRecord,
    StoredKey,
    pod_record,
    shared_keys,
    shared_map,
    worker_metadata,
)
from dynaplan.store.kubernetes_kv.follower import ClusterFollower
from dynaplan.store.kubernetes_kv.lapsing import HeldLeases
from dynaplan.store.kubernetes_kv.objects import ClusterObjects
from dynaplan.store.kubernetes_kv.picture import ClusterPicture
from dynaplan.store.kubernetes_objects import STORE_MAP
from dynaplan.store.model import KeyValue, Transaction, WatchEvent
from dynaplan.util.errors import (
    ClusterConflict,
    ClusterExpired,
    ClusterForbidden,
    ClusterNotFound,
    ClusterUnavailable,
    ConfigError,
    PermanentError,
    StoreUnavailable,
)

ANSWER_S = 2.9
"""Seconds in which every call ends."""

READ, WRITE_OWN, WRITE_SHARED = "read", "write own", "write shared"
"""Kinds of calls, by the rights that they need."""

Leases = Mapping[int, HeldLease]

LEASE_BITS = 52
"""Dynamo's instance ids are exact in a JSON reader that has only floating-point numbers."""

PROCESS = secrets.token_hex(8)
"""The mark of this process: what its pod's object has of another one is of a container that has ended."""


class ClusterStore:
    """A Kubernetes namespace as ``dynaplan.store.port.Store``; ``pod`` is the one of this process.

    Without a pod it reads and writes, and grants no lease. Revisions rise with the cluster's resource
    versions.
    """

    def __init__(self, client: KubernetesClient, pod: PodIdentity | None) -> None:
        self._client = client
        self._pod = pod
        self._own = pod.name if pod else ""
        self._follower = ClusterFollower(client, self._own)
        self._held = HeldLeases(self.revoke)
        self._writing = asyncio.Lock()
        self._allowed: set[str] = set()
        self._is_closed = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> ClusterStore:
        """The store of ``POD_NAMESPACE``, for the pod ``POD_NAME`` with ``POD_UID``; raises ConfigError."""
        name, uid = environ.get("POD_NAME", ""), environ.get("POD_UID", "")
        return cls(
            KubernetesClient.from_environment(environ), PodIdentity(name, uid) if name and uid else None
        )

    async def get(self, key: str) -> KeyValue | None:
        """The key, or None when it is absent."""
        current = self._follower.current
        item = current.seen_by(self._own).get(key) if current else None
        if item and item.lease in self._held:
            return item
        return {item.key: item for item in await self.list(key)}.get(key)

    async def list(self, prefix: str) -> tuple[KeyValue, ...]:
        """Every key under the prefix, in key order."""
        objects = ClusterObjects()
        async with self._asking(READ):
            await objects.refresh(self._client)
        seen = objects.picture.seen_by(self._own)
        return tuple(item for key, item in seen.items() if key.startswith(prefix))

    async def put(self, key: str, value: str, lease: int = 0) -> None:
        """Write the key; raises PermanentError when the lease does not exist."""
        await self.commit(Transaction(puts={key: value}, lease=lease))

    async def delete(self, key: str) -> None:
        """Remove the key; nothing happens when it is absent."""
        await self.commit(Transaction(deletes=(key,)))

    async def commit(self, transaction: Transaction) -> bool:
        """Carry the transaction out as a whole; False when its expectation fails.

        Deletions of keys that pods have registered are writes of their own, after the others.
        """
        is_shared = bool(transaction.expected) or not (transaction.lease and transaction.puts)
        async with self._asking(WRITE_SHARED if is_shared else WRITE_OWN), self._writing:
            if is_shared:
                return await self._commit_shared(transaction)
            await self._commit_to_pod(transaction)
            if transaction.deletes:
                await self._commit_shared(Transaction(deletes=transaction.deletes))
            return True

    def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        """A Snapshot, then every change, without a gap, until the store is closed."""
        return self._follower.events(prefix)

    async def grant(self, ttl_s: int) -> int:
        """Make a lease of this process's pod; raises ConfigError outside a pod."""
        if self._pod is None:
            raise ConfigError(
                "this process runs in no pod, and what it registers in a cluster is to end with one",
                hint="Set POD_NAME and POD_UID by the downward API, as `dynaplan export kubernetes` does.",
            )
        lease = secrets.randbits(LEASE_BITS) | 1
        async with self._asking(WRITE_OWN), self._writing:
            await self._change(self._own, lambda leases: {**leases, lease: HeldLease(ttl_s)})
        self._held.hold(lease, ttl_s)
        return lease

    async def keep_alive(self, lease: int) -> float:
        """Renew the lease; its time to live in seconds, 0.0 when it no longer exists.

        Nothing is written: the process that was granted the lease ends it when nobody renews it.
        """
        self._held.renew(lease)
        current = self._follower.current
        held = current.holder(lease) if current else None
        if held is None or self._is_closed:
            async with self._asking(READ):
                held = await self._holder(lease)
        if held is None:
            self._held.drop(lease)
        return float(held[1]) if held else 0.0

    async def revoke(self, lease: int) -> None:
        """End the lease and delete its keys; nothing happens when it no longer exists."""
        async with self._asking(WRITE_OWN), self._writing:
            held = await self._holder(lease)
            if held:
                await self._change(
                    held[0], lambda leases: {each: of for each, of in leases.items() if each != lease}
                )
        self._held.drop(lease)

    async def identity(self) -> str:
        """Return the place: a cluster that comes back empty has none of our pods either."""
        async with self._asking(""):
            return f"kubernetes/{self._client.namespace}"

    async def close(self) -> None:
        """Close the connections and end every watch; leases stay until their pod is gone."""
        self._is_closed = True
        await self._held.close()
        await self._follower.close()
        await self._client.close()

    async def _commit_shared(self, transaction: Transaction) -> bool:
        """Carry out a transaction on the shared keys; see ``commit``.

        The ConfigMap is read before the records: a lease that it names is in a record by then, or has ended.
        """
        while True:
            before = await self._shared_map()
            documents, version = await self._records()
            records = {name: pod_record(found) for name, found in documents.items()}
            picture = ClusterPicture(shared_keys(before) if before else {}, records)
            if transaction.puts and transaction.lease and not picture.holder(transaction.lease):
                raise PermanentError(f"lease {transaction.lease:x} does not exist")
            keys = picture.all_keys()
            for key, revision in transaction.expected.items():
                if (keys[key].revision if key in keys else 0) != revision:
                    return False
            shared = {key: stored for key, stored in picture.shared.items() if keys.get(key) == stored}
            shared |= _stored(transaction, version + 1)
            try:
                await self._write_shared(_without(shared, transaction.deletes), before)
            except (ClusterConflict, ClusterNotFound):
                continue
            await self._forget({*transaction.deletes, *transaction.puts}, records)
            return True

    async def _commit_to_pod(self, transaction: Transaction) -> None:
        """Write keys into the object of their lease's pod; PermanentError when there is none."""
        while True:
            documents, version = await self._records()
            records = {name: pod_record(found) for name, found in documents.items()}
            held = ClusterPicture(pods=records).holder(transaction.lease)
            if held is None:
                raise PermanentError(f"lease {transaction.lease:x} does not exist")
            name, record = held[0], records[held[0]]
            # A key that was under another lease of the pod would come back with the end of this one.
            leases = {each: _released(of, transaction.puts) for each, of in record.leases.items()}
            lease = leases[transaction.lease]
            keys = {**lease.keys, **_stored(transaction, version + 1)}
            leases[transaction.lease] = replace(lease, keys=keys)
            try:
                await self._write_record(name, replace(record, leases=leases), documents[name])
            except (ClusterConflict, ClusterNotFound):
                continue
            break
        before = await self._shared_map()
        if before and any(key in transaction.puts for key in shared_keys(before)):
            await self._commit_shared(Transaction())  # which leaves out what is newer elsewhere

    async def _forget(self, keys: set[str], records: Mapping[str, PodRecord]) -> None:
        """Take keys out of the objects of pods: they are deleted, or written elsewhere by now."""
        for name, record in records.items():
            if any(keys & held.keys.keys() for held in record.leases.values()):
                await self._change(
                    name,
                    lambda leases: {lease: _released(held, keys) for lease, held in leases.items()},
                )

    async def _change(self, name: str, change: Callable[[Leases], Leases]) -> None:
        """Change the leases of a pod; the own pod's object is made when it is not there."""
        while True:
            try:
                before = await self._client.get(WORKER_METADATA, name)
            except ClusterNotFound:
                before = None
            record = pod_record(before) if before else PodRecord()
            if name == self._own and record.process != PROCESS:
                record = PodRecord(process=PROCESS)
            leases = change(record.leases)
            if leases == record.leases or (before is None and name != self._own):
                return
            try:
                await self._write_record(name, replace(record, leases=leases), before)
                return
            except ClusterConflict:
                continue
            except ClusterNotFound:
                if before is None:
                    raise

    async def _write_record(self, name: str, record: PodRecord, before: Object | None) -> None:
        document = worker_metadata(name, record, before, self._pod if name == self._own else None)
        if before:
            await self._client.replace(WORKER_METADATA, name, document)
        else:
            await self._client.create(WORKER_METADATA, document)

    async def _write_shared(self, keys: Mapping[str, StoredKey], before: Object | None) -> None:
        if keys == (shared_keys(before) if before else {}):
            return
        document = shared_map(STORE_MAP, keys, before)
        if before:
            await self._client.replace(CONFIG_MAPS, STORE_MAP, document)
        else:
            await self._client.create(CONFIG_MAPS, document)

    async def _shared_map(self) -> Object | None:
        try:
            return await self._client.get(CONFIG_MAPS, STORE_MAP)
        except ClusterNotFound:
            return None

    async def _records(self) -> tuple[dict[str, Object], int]:
        """Return the objects of the pods by name, and the version of the list."""
        items, version = await ClusterObjects().records.listed(self._client)
        return {each["metadata"]["name"]: each for each in items}, version

    async def _holder(self, lease: int) -> tuple[str, int] | None:
        documents, _ = await self._records()
        records = {name: pod_record(found) for name, found in documents.items()}
        return ClusterPicture(pods=records).holder(lease)

    @asynccontextmanager
    async def _asking(self, what: str) -> AsyncGenerator[None]:
        """Bound a call, and turn what a retry may cure into StoreUnavailable.

        What was allowed once is refused, or not served, by an API server that has just started: it reads the
        Roles and definitions only then.
        """
        if self._is_closed:
            raise StoreUnavailable("the store is closed")
        try:
            async with asyncio.timeout(ANSWER_S):
                yield
        except TimeoutError as error:
            raise StoreUnavailable("the Kubernetes API server does not answer in time") from error
        except (ClusterUnavailable, ClusterConflict, ClusterExpired) as error:
            raise StoreUnavailable(str(error)) from error
        except (ClusterForbidden, ClusterNotFound) as error:
            if what not in self._allowed:
                raise
            raise StoreUnavailable(str(error)) from error
        self._allowed.add(what)


def _stored(transaction: Transaction, revision: int) -> dict[str, StoredKey]:
    return {key: StoredKey(value, revision, transaction.lease) for key, value in transaction.puts.items()}


def _without(keys: Mapping[str, StoredKey], gone: Container[str]) -> dict[str, StoredKey]:
    return {key: stored for key, stored in keys.items() if key not in gone}


def _released(held: HeldLease, gone: Container[str]) -> HeldLease:
    """The lease without those keys."""
    return replace(held, keys=_without(held.keys, gone))
