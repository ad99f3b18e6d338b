"""A program that leaves its deployment closes all that it has opened, whatever fails of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dynaplan.worker.distributed_runtime import Runtime
from tests.fakes.store import FakeStore


@pytest.fixture
def closed() -> list[str]:
    """What the event plane of ``runtime`` notes at its end."""
    return []


@pytest.fixture
async def runtime(store: FakeStore, clock: Any, closed: list[str]) -> Runtime:
    """A runtime with a discovery, an event plane and a session."""

    async def close() -> None:
        closed.append("events")

    async def connect_events() -> Any:
        return SimpleNamespace(close=close)

    made = Runtime(
        own_namespace="ns",
        store=store,
        clock=clock,
        token="",
        connect_messenger=lambda: pytest.fail("nobody asked for a messenger"),
        connect_events=connect_events,
    )
    await made.discovery("ns")
    await made.event_plane()
    assert not made.http.is_closed
    return made


async def test_what_cannot_be_closed_leaves_nothing_else_open(
    runtime: Runtime, closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    discovery = await runtime.discovery("ns")

    async def fail() -> None:
        await close()
        raise OSError("broken")

    close = discovery.close
    monkeypatch.setattr(discovery, "close", fail)
    with pytest.raises(OSError, match="broken"):
        await runtime.close()
    assert (closed, runtime.http.is_closed) == (["events"], True)


async def test_a_program_that_does_not_wait_for_the_drain_leaves_nothing_open(
    runtime: Runtime, closed: list[str]
) -> None:
    serving = asyncio.create_task(asyncio.Event().wait())
    cast(set[Any], runtime._serving).add(serving)
    closing = asyncio.create_task(runtime.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing})
    assert (closing.cancelled(), serving.cancelled()) == (True, True)
    assert (closed, runtime.http.is_closed) == (["events"], True)
