"""A worker's runtime on a store of the test's own, without a messenger."""

from __future__ import annotations

from typing import Any

import pytest

from dynaplan.store.discovery import Discovery
from dynaplan.worker.worker_runtime import WorkerRuntime
from tests.fakes.clock import LoopClock
from tests.fakes.store import FakeStore


def worker_runtime(
    store: FakeStore | None = None, *, namespace: str = "ns", component: str = "VllmWorker", **fields: Any
) -> WorkerRuntime:
    store = store or FakeStore()
    made: dict[str, Any] = {
        "worker_name": f"{namespace}_{component}",
        "worker_token": "token",
        "url": "http://127.0.0.1:1",
        "clock": LoopClock(),
        "discovery": Discovery(store, namespace),
        "connect_messenger": lambda: pytest.fail("nobody asked for a messenger"),
    }
    return WorkerRuntime(namespace=namespace, component=component, store=store, **(made | fields))
