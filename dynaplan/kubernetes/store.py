"""The key-value store and its leases in a cluster's API: ``dynaplan.store.port.Store`` without a server.

=======================================  =========================================================
key                                      where it is
=======================================  =========================================================
under a lease, put without a condition   the ``DynamoWorkerMetadata`` of the lease's pod
any other                                the ConfigMap ``dynaplan-store``
=======================================  =========================================================

1. **Write.** Each object is read, changed and written over the version that was read, so a write happens
   whole or not at all, and a condition on a key is a condition on the ConfigMap. A key that is taken under a
   lease, as by a lock, is there: it exists as long as the lease is in its pod's object.
2. **Lease.** It is in its pod's object, which the pod owns: so it ends with its pod, even unrevoked, and no
   renewal writes anything. A lease that its own process does not renew in time is ended by that process.
3. **Watch.** One watch of each kind of object feeds the watches of this process. What a pod has registered is
   seen by others while an EndpointSlice calls the pod ready (docs/decisions/0003).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Container, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

from dynaplan.kubernetes.client import CONFIG_MAPS, KubernetesClient, Object, Resource
from dynaplan.kubernetes.names import STORE_MAP
from dynaplan.kubernetes.store_documents import (
    WORKER_METADATA,
    ClusterObjects,
    ClusterState,
    ObjectKind,
    PodIdentity,
    PodLease,
    PodRecord,
    StoredKey,
    pod_record,
    shared_keys,
    shared_map,
    worker_metadata,
)
from dynaplan.store.hub import WatchHub
from dynaplan.store.model import KeyValue, Transaction, WatchEvent
from dynaplan.store.timing import (
    CALL_RETRY_MAX_S,
    CALL_RETRY_MIN_S,
    KUBERNETES_CALL_TIMEOUT_S,
    KUBERNETES_WATCH_MIN_S,
    WATCH_RETRY_MAX_S,
    WATCH_RETRY_MIN_S,
)
from dynaplan.util.backoff import Backoff
from dynaplan.util.errors import (
    ClusterConflict,
    ClusterExpired,
    ClusterForbidden,
    ClusterNotFound,
    ClusterUnavailable,
    ConfigError,
    DynaplanError,
    PermanentError,
    StoreUnavailable,
)
from dynaplan.util.tasks import BackgroundTasks

READ, WRITE_OWN, WRITE_SHARED = "read", "write own", "write shared"
"""Kinds of calls, by the rights that they need."""

Leases = Mapping[int, PodLease]

LEASE_BITS = 52
"""Dynamo's instance ids are exact in a JSON reader that has only floating-point numbers."""

PROCESS_ID = secrets.token_hex(8)
"""Marks this process: leases of another one in its pod's object are of a container that has ended."""


class ClusterStore:
    """A Kubernetes namespace as ``dynaplan.store.port.Store``; ``pod`` is the one of this process.

    Without a pod it reads and writes, and grants no lease. Revisions rise with the cluster's resource
    versions.
    """

    def __init__(self, client: KubernetesClient, pod: PodIdentity | None) -> None:
        self._client = client
        self._pod = pod
        self._own = pod.name if pod else ""
        self._watcher = ClusterWatcher(client, self._own)
        self._expiry = LeaseExpiry(self.revoke)
        self._writing = asyncio.Lock()
        self._allowed: set[str] = set()
        self._written: dict[Resource, int] = {}
        self._is_closed = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> ClusterStore:
        """The store of ``POD_NAMESPACE``, for the pod ``POD_NAME`` with ``POD_UID``; raises ConfigError."""
        name, uid = environ.get("POD_NAME", ""), environ.get("POD_UID", "")
        return cls(
            KubernetesClient.from_environment(environ), PodIdentity(name, uid) if name and uid else None
        )

    async def get(self, key: str) -> KeyValue | None:
        """Return the key and its value; None when it is absent.

        A key under a lease of this process is taken from the watch, if that has seen our own writes: a lock
        that is checked all the time costs no call, and others' writes are seen milliseconds later.
        """
        current = self._watcher.current if self._watcher.has_seen(self._written) else None
        item = current.visible_to(self._own).get(key) if current else None
        if item and item.lease in self._expiry:
            return item
        return {item.key: item for item in await self.list(key)}.get(key)

    async def list(self, prefix: str) -> tuple[KeyValue, ...]:
        objects = ClusterObjects()
        async with self._calling(READ):
            await objects.refresh(self._client)
        seen = objects.state.visible_to(self._own)
        return tuple(item for key, item in seen.items() if key.startswith(prefix))

    async def put(self, key: str, value: str, lease: int = 0) -> None:
        await self.commit(Transaction(puts={key: value}, lease=lease))

    async def delete(self, key: str) -> None:
        await self.commit(Transaction(deletes=(key,)))

    async def commit(self, transaction: Transaction) -> bool:
        """Carry the transaction out as a whole; False when its expectation fails.

        Deletions of keys that pods have registered are writes of their own, after the others.
        """
        is_shared = bool(transaction.expected) or not (transaction.lease and transaction.puts)
        async with self._calling(WRITE_SHARED if is_shared else WRITE_OWN), self._writing:
            if is_shared:
                return await self._commit_shared(transaction)
            await self._commit_to_pod(transaction)
            if transaction.deletes:
                await self._commit_shared(Transaction(deletes=transaction.deletes))
            return True

    def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        return self._watcher.events(prefix)

    async def grant(self, ttl_s: int) -> int:
        """Make a lease of this process's pod; raises ConfigError outside a pod."""
        if self._pod is None:
            raise ConfigError(
                "this process runs in no pod, and what it registers in a cluster is to end with one",
                hint="Set POD_NAME and POD_UID by the downward API, as `dynaplan export kubernetes` does.",
            )
        lease = secrets.randbits(LEASE_BITS) | 1
        async with self._calling(WRITE_OWN), self._writing:
            await self._update_leases(self._own, lambda leases: {**leases, lease: PodLease(ttl_s)})
        self._expiry.start(lease, ttl_s)
        return lease

    async def keep_alive(self, lease: int) -> float:
        """Renew the lease; its time to live in seconds, 0.0 when it no longer exists.

        Nothing is written: the process that was granted the lease ends it when nobody renews it.
        """
        self._expiry.renew(lease)
        current = self._watcher.current
        held = current.find_holder(lease) if current else None
        if held is None or self._is_closed:
            async with self._calling(READ):
                held = await self._find_holder(lease)
        if held is None:
            self._expiry.cancel(lease)
        return float(held[1]) if held else 0.0

    async def revoke(self, lease: int) -> None:
        """End the lease and delete its keys; nothing happens when it no longer exists."""
        async with self._calling(WRITE_OWN), self._writing:
            held = await self._find_holder(lease)
            if held:
                await self._update_leases(
                    held[0], lambda leases: {each: of for each, of in leases.items() if each != lease}
                )
        self._expiry.cancel(lease)

    async def identity(self) -> str:
        """Return the namespace. A random mark is not needed: a cluster that was reset has lost our pods,
        too."""
        async with self._calling(""):
            return f"kubernetes/{self._client.namespace}"

    async def close(self) -> None:
        """Close the connections and end every watch; leases stay until their pod is gone."""
        self._is_closed = True
        await self._expiry.close()
        await self._watcher.close()
        await self._client.close()

    async def _commit_shared(self, transaction: Transaction) -> bool:
        """Carry out a transaction on the shared keys; see ``commit``.

        The ConfigMap is read before the records: a lease that it names is in a record by then, or has ended.
        """
        while True:
            before = await self._shared_map()
            documents, version = await self._records()
            records = {name: pod_record(found) for name, found in documents.items()}
            state = ClusterState(shared_keys(before) if before else {}, records)
            if transaction.puts and transaction.lease and not state.find_holder(transaction.lease):
                raise PermanentError(f"lease {transaction.lease:x} does not exist")
            keys = state.all_keys()
            for key, revision in transaction.expected.items():
                if (keys[key].revision if key in keys else 0) != revision:
                    return False
            shared = {key: stored for key, stored in state.shared.items() if keys.get(key) == stored}
            shared |= _new_keys(transaction, version + 1)
            try:
                await self._write_shared(_excluding(shared, transaction.deletes), before)
            except (ClusterConflict, ClusterNotFound):
                continue
            await self._remove_from_pods({*transaction.deletes, *transaction.puts}, records)
            return True

    async def _commit_to_pod(self, transaction: Transaction) -> None:
        """Write keys into the object of their lease's pod; PermanentError when there is none."""
        while True:
            documents, version = await self._records()
            records = {name: pod_record(found) for name, found in documents.items()}
            held = ClusterState(pods=records).find_holder(transaction.lease)
            if held is None:
                raise PermanentError(f"lease {transaction.lease:x} does not exist")
            name, record = held[0], records[held[0]]
            # A key that was under another lease of the pod would come back with the end of this one.
            leases = {each: _without_keys(of, transaction.puts) for each, of in record.leases.items()}
            lease = leases[transaction.lease]
            keys = {**lease.keys, **_new_keys(transaction, version + 1)}
            leases[transaction.lease] = replace(lease, keys=keys)
            try:
                await self._write_record(name, replace(record, leases=leases), documents[name])
            except (ClusterConflict, ClusterNotFound):
                continue
            break
        before = await self._shared_map()
        if before and any(key in transaction.puts for key in shared_keys(before)):
            await self._commit_shared(Transaction())  # which leaves out what is newer elsewhere

    async def _remove_from_pods(self, keys: set[str], records: Mapping[str, PodRecord]) -> None:
        """Take keys out of the objects of pods: they are deleted, or written elsewhere by now."""
        for name, record in records.items():
            if any(keys & held.keys.keys() for held in record.leases.values()):
                await self._update_leases(
                    name,
                    lambda leases: {lease: _without_keys(held, keys) for lease, held in leases.items()},
                )

    async def _update_leases(self, name: str, change: Callable[[Leases], Leases]) -> None:
        """Change the leases of a pod; the own pod's object is made when it is not there."""
        while True:
            try:
                before = await self._client.get(WORKER_METADATA, name)
            except ClusterNotFound:
                before = None
            record = pod_record(before) if before else PodRecord()
            if name == self._own and record.process != PROCESS_ID:
                record = PodRecord(process=PROCESS_ID)
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
        await self._write(WORKER_METADATA, name, document, is_new=before is None)

    async def _write_shared(self, keys: Mapping[str, StoredKey], before: Object | None) -> None:
        if keys == (shared_keys(before) if before else {}):
            return
        document = shared_map(STORE_MAP, keys, before)
        await self._write(CONFIG_MAPS, STORE_MAP, document, is_new=before is None)

    async def _write(self, resource: Resource, name: str, document: Object, *, is_new: bool) -> None:
        if is_new:
            written = await self._client.create(resource, document)
        else:
            written = await self._client.replace(resource, name, document)
        version = int(written["metadata"]["resourceVersion"])
        self._written[resource] = max(version, self._written.get(resource, 0))

    async def _shared_map(self) -> Object | None:
        try:
            return await self._client.get(CONFIG_MAPS, STORE_MAP)
        except ClusterNotFound:
            return None

    async def _records(self) -> tuple[dict[str, Object], int]:
        """Return the objects of the pods by name, and the version of the list."""
        items, version = await ClusterObjects().records.list_newest(self._client)
        return {each["metadata"]["name"]: each for each in items}, version

    async def _find_holder(self, lease: int) -> tuple[str, int] | None:
        documents, _ = await self._records()
        records = {name: pod_record(found) for name, found in documents.items()}
        return ClusterState(pods=records).find_holder(lease)

    @asynccontextmanager
    async def _calling(self, what: str) -> AsyncGenerator[None]:
        """Bound a call, and turn what a retry may cure into StoreUnavailable.

        What was allowed once is refused, or not served, by an API server that has just started and has not
        read the Roles and definitions yet.
        """
        if self._is_closed:
            raise StoreUnavailable("the store is closed")
        try:
            async with asyncio.timeout(KUBERNETES_CALL_TIMEOUT_S):
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


def _new_keys(transaction: Transaction, revision: int) -> dict[str, StoredKey]:
    return {key: StoredKey(value, revision, transaction.lease) for key, value in transaction.puts.items()}


def _excluding(keys: Mapping[str, StoredKey], gone: Container[str]) -> dict[str, StoredKey]:
    return {key: stored for key, stored in keys.items() if key not in gone}


def _without_keys(held: PodLease, gone: Container[str]) -> PodLease:
    """The lease without those keys."""
    return replace(held, keys=_excluding(held.keys, gone))


log = logging.getLogger(__name__)


class ClusterWatcher:
    """Follows the store's three kinds of objects from the first watch on.

    They are the shared ConfigMap, each pod's ``DynamoWorkerMetadata``, and EndpointSlices.
    While the API server is away the last known keys stay; when it is back, watches get the differences.
    """

    def __init__(self, client: KubernetesClient, pod: str) -> None:
        self._client = client
        self._pod = pod
        self._objects = ClusterObjects()
        self._state = ClusterState()
        self._hub = WatchHub()
        self._connected: set[int] = set()
        self._unready: set[str] = set()
        self._tasks = BackgroundTasks(lambda _, error: self._hub.fail(error))

    @property
    def current(self) -> ClusterState | None:
        """Return what is known, some milliseconds old; None while the API server is not being followed."""
        is_whole = self._hub.has_synced and len(self._connected) == len(self._objects.kinds)
        return self._state if is_whole else None

    def has_seen(self, versions: Mapping[Resource, int]) -> bool:
        """Tell whether what is known includes these versions of the kinds of objects."""
        return all(kind.version >= versions.get(kind.resources[0], 0) for kind in self._objects.kinds)

    async def events(self, prefix: str) -> AsyncGenerator[WatchEvent]:
        if not len(self._tasks) and not self._hub.is_closed:
            for kind in self._objects.kinds:
                self._tasks.spawn(self._follow(kind), f"watch {kind.resources[0].plural}")
        elif self._hub.has_synced:
            await self._catch_up()
        async with aclosing(self._hub.watch(prefix)) as events:
            async for event in events:
                yield event

    async def close(self) -> None:
        """End every watch."""
        self._hub.close()
        await self._tasks.cancel()

    async def _catch_up(self) -> None:
        """Read all that was written before now; when that fails, keep what is known."""
        try:
            await self._objects.refresh(self._client)
            self._connected.update(id(kind) for kind in self._objects.kinds)
        except DynaplanError as error:
            log.debug("a watch begins with what is known: %s", error)
        self._update()

    async def _follow(self, kind: ObjectKind) -> None:
        backoff = Backoff(WATCH_RETRY_MIN_S, WATCH_RETRY_MAX_S)
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            try:
                await self._watch(kind, backoff)
                if loop.time() - began_s >= KUBERNETES_WATCH_MIN_S:
                    backoff.reset()
                    continue
            except ClusterExpired as error:
                log.debug("listing again: %s", error)
                kind.version = 0
            except DynaplanError as error:
                if self.current or (backoff.is_first and not self._hub.has_synced):
                    log.warning("keeping the last known state of the cluster: %s", error)
                self._connected.discard(id(kind))
                kind.version = 0
            await backoff.pause()

    async def _watch(self, kind: ObjectKind, backoff: Backoff) -> None:
        """List the objects unless their version is known, then follow them until the watch ends."""
        if not kind.version:
            items, version = await kind.list_newest(self._client)
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
        """Feed the hub the objects' keys, once all three kinds are known."""
        if all(kind.has_synced for kind in self._objects.kinds):
            self._state = self._objects.state
            self._hub.update(self._state.visible_to(self._pod))
            self._log_unready_pods()

    def _log_unready_pods(self) -> None:
        unready_pods = set(self._state.unready_pods()) - {self._pod}
        for name in sorted(unready_pods - self._unready):
            log.info("pod %s has registered and is not ready in any EndpointSlice: not used yet", name)
        self._unready = unready_pods


class LeaseExpiry:
    """Expires this process's own leases: ``end`` ends one in the store.

    An attempt to renew counts, whether the store answers it or not: its holder wants to keep the lease.
    """

    def __init__(self, end: Callable[[int], Awaitable[None]]) -> None:
        self._end = end
        self._timers: dict[int, tuple[float, asyncio.TimerHandle]] = {}
        self._tasks = BackgroundTasks()

    def __contains__(self, lease: int) -> bool:
        return lease in self._timers

    def start(self, lease: int, ttl_s: float) -> None:
        """Expire the lease after ``ttl_s`` seconds without ``renew``."""
        timer = asyncio.get_running_loop().call_later(ttl_s, self._expire, lease)
        self._timers[lease] = (ttl_s, timer)

    def renew(self, lease: int) -> None:
        """Restart the lease's time; nothing happens to another process's lease."""
        if lease in self._timers:
            self.start(lease, self._cancel_timer(lease))

    def cancel(self, lease: int) -> None:
        if lease in self._timers:
            self._cancel_timer(lease)

    async def close(self) -> None:
        """Stop all timers; the leases stay in the store."""
        for lease in tuple(self._timers):
            self._cancel_timer(lease)
        await self._tasks.cancel()

    def _cancel_timer(self, lease: int) -> float:
        ttl_s, timer = self._timers.pop(lease)
        timer.cancel()
        return ttl_s

    def _expire(self, lease: int) -> None:
        self._tasks.spawn(self._end_expired(lease, self._timers[lease]), f"end of lease {lease:x}")

    async def _end_expired(self, lease: int, lapsed: tuple[float, asyncio.TimerHandle]) -> None:
        """End the lease as soon as the store answers, unless it has been renewed meanwhile."""
        backoff = Backoff(CALL_RETRY_MIN_S, CALL_RETRY_MAX_S)
        while self._timers.get(lease) is lapsed:
            try:
                await self._end(lease)
            except StoreUnavailable:
                await backoff.pause()
            except DynaplanError as error:
                log.warning("lease %x has expired and cannot be ended: %s", lease, error)
                return
