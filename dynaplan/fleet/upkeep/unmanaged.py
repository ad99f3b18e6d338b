"""The workers that outlive ``serve``: others have started them, and it tells of them at its end."""

from __future__ import annotations

import asyncio

from dynaplan.store import connections
from dynaplan.store.instances import SERVICES_PREFIX, Instance
from dynaplan.util.errors import PermanentError, TemporaryError

ANSWER_S = 1.0
"""Longest time for the store to list them, in seconds."""


async def staying(namespace: str) -> str:
    """Return a line about the unmanaged components that are registered; empty when none is known."""
    from dynaplan.fleet.rules.observing import unmanaged

    # In a thread: it imports the store's client, for which nothing that ends meanwhile is to wait.
    store = await asyncio.to_thread(connections.connect_store)
    try:
        async with asyncio.timeout(ANSWER_S):
            items = await store.list(f"{SERVICES_PREFIX}{namespace}/")
    except (TemporaryError, PermanentError, TimeoutError):
        return ""
    finally:
        await store.close()
    found = []
    for item in items:
        try:
            found.append(Instance.from_json(item.value))
        except ValueError:
            continue
    names = [f"{each.worker} (pid {each.pid})" for each in unmanaged(found)]
    return f"Left running, because serve has not started them: {', '.join(names)}." if names else ""
