"""The index of one more frontend of a running deployment: what its workers tell of their KV blocks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dynaplan.events import event_connections
from dynaplan.events.component_events import ComponentEvents
from dynaplan.gateway.kv_routing.follower import KvCacheFollower, SnapshotClient
from dynaplan.store import connections
from dynaplan.store.discovery import Discovery
from tests.e2e.deployment import Deployment


@asynccontextmanager
async def kv_index_of(deployment: Deployment) -> AsyncIterator[KvCacheFollower]:
    """A follower beside the deployment's own, with the variables that every client has."""
    environment = deployment.clients_environment()
    token = environment["DYNAPLAN_WORKER_TOKEN"]
    store = connections.connect_store(environment)
    plane = await event_connections.connect_events(environment)
    discovery = Discovery(store, deployment.namespace)
    await discovery.start()
    client = SnapshotClient(token)

    async def connect() -> ComponentEvents:
        return ComponentEvents(plane, deployment.namespace, "Frontend")

    follower = KvCacheFollower(discovery, deployment.namespace, connect, client)
    follower.start()
    try:
        yield follower
    finally:
        await follower.close()
        await discovery.close()
        await plane.close()
        await store.close()
