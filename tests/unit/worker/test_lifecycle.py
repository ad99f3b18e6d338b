from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynaplan.store.discovery import Discovery
from dynaplan.store.instances import Instance
from dynaplan.store.registration import Registration
from dynaplan.worker.lifecycle import SHUTDOWN_HOOKS_TIMEOUT_S, DrainReport, drain
from dynaplan.worker.server import InFlight
from tests.fakes.store import FakeStore
from tests.fakes.worker_runtime import worker_runtime

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


class Server:
    """A server without sockets: what a drain asks of one."""

    def __init__(self, events: list[str]) -> None:
        self.in_flight = InFlight()
        self.events = events

    async def drain(self) -> None:
        self.events.append("refuse new work")


class Worker:
    """A registered worker that can be drained, and what happened to it, in order."""

    def __init__(self, store: FakeStore, clock: Any) -> None:
        self.events: list[str] = []
        self.store = store
        self.server = Server(self.events)
        self.discovery = Discovery(store, "ns")
        self.hooks: list[Any] = []
        self.runtime = worker_runtime(store, clock=clock, discovery=self.discovery)
        self.registration = Registration(store, clock, self.discovery, self._instances)

    def _instances(self, lease: int) -> list[Instance]:
        return [Instance("ns", "VllmWorker", "generate", lease, "http://127.0.0.1:1")]

    async def start(self) -> None:
        await self.discovery.start()
        await self.registration.start()
        self.discovery.on_change(self._look)

    def _look(self) -> None:
        if not self.discovery.all():
            self.events.append("deregistered")

    async def hold(self, seconds: float) -> None:
        with self.server.in_flight:
            await asyncio.sleep(seconds)
            self.events.append("finished")

    async def drain(self, deadline_s: float = 30.0, why: str = "SIGTERM arrived") -> DrainReport:
        self.runtime.leave(why)
        return await drain(self.runtime, [self.server], self.registration, self.hooks, deadline_s)  # type: ignore[list-item]


@pytest.fixture
async def worker(store: FakeStore, clock: Any) -> AsyncIterator[Worker]:
    made = Worker(store, clock)
    await made.start()
    yield made
    await made.discovery.close()
    await made.runtime.close()


async def test_what_is_held_finishes_first_and_then_the_hooks_run(worker: Worker) -> None:
    async def finisher() -> None:
        worker.events.append("callback")

    async def closer() -> None:
        worker.events.append("closed")

    worker.runtime.on_drain(finisher)
    worker.runtime.on_stop(closer)
    worker.hooks.append(lambda: worker.events.append("hook"))
    holding = asyncio.create_task(worker.hold(5))
    await asyncio.sleep(0.01)
    report = await worker.drain()
    await holding
    assert worker.events == ["refuse new work", "deregistered", "callback", "finished", "hook", "closed"]
    assert (report.held, report.cut) == (1, 0)
    assert worker.store.items == {}
    assert worker.runtime.is_draining


async def test_the_log_holds_the_proof(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    holding = [asyncio.create_task(worker.hold(seconds)) for seconds in (1, 2, 3)]
    await asyncio.sleep(0.01)
    await worker.drain(why="the lease was revoked")
    await asyncio.gather(*holding)
    assert re.fullmatch(
        r"drained: held 3 requests when told to leave, 3 finished, 0 cut, in 2\.9\d\d s "
        r"\(because the lease was revoked\)",
        caplog.messages[-1],
    )


async def test_the_deadline_cuts_counts_and_logs(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    holding = [asyncio.create_task(worker.hold(seconds)) for seconds in (1, 1000)]
    await asyncio.sleep(0.01)
    report = await worker.drain(deadline_s=5)
    assert (report.held, report.cut) == (2, 1)
    assert "1 finished, 1 cut, in 5.0" in caplog.messages[-1]
    holding[1].cancel()
    await asyncio.gather(*holding, return_exceptions=True)


async def test_work_outside_the_server_is_counted_and_waited_for(worker: Worker) -> None:
    held = [1, 2]
    worker.runtime.held_requests(lambda: len(held))
    asyncio.get_running_loop().call_later(3, held.clear)
    report = await worker.drain()
    assert (report.held, report.cut) == (2, 0)
    assert 3 <= report.took_s < 3.2


async def test_what_is_held_elsewhere_is_looked_up_before_it_is_counted(worker: Worker) -> None:
    held: list[int] = []

    async def look() -> None:
        held[:] = [1, 2, 3]
        asyncio.get_running_loop().call_later(1, held.clear)

    worker.runtime.held_requests(lambda: len(held), look)
    report = await worker.drain()
    assert (report.held, report.cut) == (3, 0)


async def test_what_came_before_everybody_had_heard_of_it_is_counted_when_it_is_cut(worker: Worker) -> None:
    held: list[int] = []
    worker.runtime.held_requests(lambda: len(held))
    asyncio.get_running_loop().call_later(0.1, held.append, 1)
    report = await worker.drain(deadline_s=2)
    assert (report.held, report.cut) == (1, 1)


async def test_what_closes_slowly_has_as_long_as_the_deadline_leaves_it(worker: Worker) -> None:
    async def engine() -> None:
        try:
            await asyncio.sleep(8)
            worker.events.append("stopped")
        except asyncio.CancelledError:
            worker.events.append("killed")
            raise

    worker.runtime.ready.set()
    worker.runtime.on_stop(engine)
    await worker.drain(deadline_s=30)
    assert worker.events[-1] == "stopped"


@pytest.mark.parametrize("is_ready", [True, False])
async def test_what_closes_when_the_deadline_is_over_or_nothing_was_served_is_hurried(
    worker: Worker, is_ready: bool
) -> None:
    async def engine() -> None:
        try:
            await asyncio.sleep(8)
        except asyncio.CancelledError:
            worker.events.append("killed")
            raise

    if is_ready:
        worker.runtime.ready.set()
        worker.runtime.held_requests(lambda: 1)
    worker.runtime.on_stop(engine)
    report = await worker.drain(deadline_s=5 if is_ready else 30)
    assert worker.events[-1] == "killed"
    assert report.took_s < (6.5 if is_ready else 1.5)


async def test_a_drain_that_is_cancelled_leaves_nothing_running(worker: Worker) -> None:
    async def engine() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            worker.events.append("killed")

    worker.runtime.on_stop(engine)
    draining = asyncio.create_task(worker.drain())
    await asyncio.sleep(0.5)
    draining.cancel()
    await asyncio.wait({draining})
    assert (draining.cancelled(), worker.events[-1]) == (True, "killed")


async def test_an_idle_worker_leaves_soon_but_not_before_routers_have_heard_of_it(worker: Worker) -> None:
    report = await worker.drain()
    assert 0.2 <= report.took_s < 0.5


async def test_one_whose_routers_have_said_that_nothing_comes_any_more_leaves_at_once(worker: Worker) -> None:
    async def proof() -> None:
        await asyncio.sleep(0.1)

    worker.runtime.on_drain(proof, ends_requests=True)
    report = await worker.drain()
    assert 0.1 <= report.took_s < 0.2


async def test_a_store_that_is_away_does_not_keep_a_worker_from_leaving(worker: Worker) -> None:
    worker.store.is_frozen = True
    report = await worker.drain()
    assert report.took_s < 3
    worker.store.is_frozen = False


async def test_a_hook_that_fails_or_hangs_does_not_keep_a_worker_from_leaving(worker: Worker) -> None:
    def failing() -> None:
        raise ValueError("hook")

    async def hanging() -> None:
        await asyncio.sleep(10_000)

    worker.hooks += [failing, hanging]
    report = await worker.drain()
    assert SHUTDOWN_HOOKS_TIMEOUT_S <= report.took_s < SHUTDOWN_HOOKS_TIMEOUT_S + 1


async def test_a_worker_that_fails_while_draining_stops_waiting(worker: Worker) -> None:
    async def engine() -> None:
        await asyncio.sleep(2)
        raise RuntimeError("engine died")

    holding = asyncio.create_task(worker.hold(1000))
    worker.runtime.spawn(engine(), "engine")
    await asyncio.sleep(0.01)
    report = await worker.drain()
    assert report.cut == 1
    assert report.took_s < 3
    assert str(worker.runtime.failed.result()) == "engine died"
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)


async def test_only_the_first_reason_to_leave_counts(worker: Worker) -> None:
    worker.runtime.leave("first")
    worker.runtime.leave("second")
    assert worker.runtime.drain_requested.result() == "first"


async def test_an_exception_in_a_background_task_fails_the_process_and_an_end_does_not(
    worker: Worker,
) -> None:
    async def ends() -> None:
        return None

    async def fails() -> None:
        raise ValueError("background")

    worker.runtime.spawn(ends(), "ends")
    await asyncio.sleep(0.01)
    assert not worker.runtime.failed.done()
    worker.runtime.spawn(fails(), "fails")
    await asyncio.sleep(0.01)
    assert isinstance(worker.runtime.failed.result(), ValueError)
