"""The index of one more frontend of a running deployment: what its workers tell of their KV blocks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dynaplan import wiring
from dynaplan.runtime.coordination.events import ComponentEvents
from dynaplan.runtime.discovery import Discovery
from dynaplan.serving.routing.kv_cache_follower import KvCacheFollower, SnapshotClient
from tests.e2e.deployment import Deployment


@asynccontextmanager
async def kv_index_of(deployment: Deployment) -> AsyncIterator[KvCacheFollower]:
    """A follower beside the deployment's own, with the variables that every client has."""
    environment = deployment.clients_environment()
    token = environment["DYNAPLAN_WORKER_TOKEN"]
    store = wiring.connections.connect_store(environment)
    plane = await wiring.connections.connect_events(store, environment, token=token)
    discovery = Discovery(store, deployment.namespace)
    await discovery.start()
    client = SnapshotClient(token)

    async def connect() -> ComponentEvents:
        return ComponentEvents(plane, deployment.namespace, "Frontend")

    follower = KvCacheFollower(discovery, deployment.namespace, connect, client.fetch)
    follower.start()
    try:
        yield follower
    finally:
        await follower.close()
        await client.close()
        await discovery.close()
        await plane.close()
        await store.close()
