"""A joined process's runtime over a store that a test has opened."""

from __future__ import annotations

from dynaplan.events.port import EventPlane, Messenger
from dynaplan.store.port import Store
from dynaplan.util.clock import SystemClock
from dynaplan.worker.distributed_runtime import Runtime


def runtime_of(store: Store, namespace: str = "ns") -> Runtime:
    """The runtime of a program in that namespace: it has a store, and neither messages nor events."""
    return Runtime(
        own_namespace=namespace,
        store=store,
        clock=SystemClock(),
        token="token",
        connect_messenger=_no_messenger,
        connect_events=_no_events,
    )


async def _no_messenger() -> Messenger:
    raise AssertionError("no messages here")


async def _no_events() -> EventPlane:
    raise AssertionError("no events here")
