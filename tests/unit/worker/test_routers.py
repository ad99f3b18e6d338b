from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.store.discovery import Discovery
from dynaplan.store.instances import Instance
from dynaplan.util.errors import PermanentError, TemporaryError
from dynaplan.worker.routers import ROUTER_SILENT_S, RoutedRequests, RouterPresence
from tests.fakes.store import FakeStore
from tests.fakes.worker_runtime import worker_runtime

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

HOME = "http://127.0.0.1:1"
AWAY = "http://127.0.0.1:2"


class Routed(RoutedRequests):
    """Routers that answer from a table, without sockets; None is one that does not answer."""

    answers: dict[str, int | None]
    asked = 0
    notices: set[str]

    async def _notify_router(self, session: aiohttp.ClientSession, url: str, notice: str) -> int | None:
        self.asked += 1
        self.notices.add(notice)
        return self.answers[url]


class Stage:
    """A registered worker, its engine and its routers."""

    def __init__(self, store: FakeStore, clock: Any) -> None:
        self.store = store
        self.in_engine: int | None = 0
        self.discovery = Discovery(store, "ns")
        self.runtime = worker_runtime(store, clock=clock, discovery=self.discovery)
        self.runtime.instance_id = 0xAB
        self.routed = Routed(self.runtime, self._requests, lambda: WorkerLoad(3, waiting_requests=2))
        self.routed.answers, self.routed.notices = {}, set()

    async def _requests(self) -> int:
        if self.in_engine is None:
            raise TemporaryError("the engine does not answer")
        return self.in_engine

    async def router(self, url: str, answer: int | None, routes_to: str = "VllmWorker") -> str:
        instance = Instance(
            "ns", "Frontend", "health", len(self.store.items), url, card={"routes_to": routes_to}
        )
        self.routed.answers[url] = answer
        await self.store.put(instance.key, instance.to_json())
        await asyncio.sleep(0.01)
        return instance.key

    async def waited_s(self, within_s: float = 60) -> float:
        """How long it takes until nothing is here any more."""
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        await asyncio.wait_for(self.routed.wait_gone(), within_s)
        return loop.time() - begin_s


@pytest.fixture
async def stage(store: FakeStore, clock: Any) -> AsyncIterator[Stage]:
    made = Stage(store, clock)
    await made.discovery.start()
    yield made
    await made.discovery.close()
    await made.runtime.close()


def later(seconds: float, change: Any) -> None:
    asyncio.get_running_loop().call_later(seconds, change)


async def test_it_ends_when_all_routers_and_the_engine_have_nothing_any_more(stage: Stage) -> None:
    await stage.router(HOME, 1)
    await stage.router(AWAY, 0)
    stage.in_engine = 1
    later(3, lambda: stage.routed.answers.update({HOME: 1}))
    later(6, lambda: setattr(stage, "in_engine", 0))
    later(9, lambda: stage.routed.answers.update({HOME: 0}))
    assert 9 <= await stage.waited_s() < 10
    assert stage.routed.held == 0
    assert stage.routed.asked < 60  # and not in every instant


async def test_what_never_counts_its_requests_is_empty_when_its_routers_say_so(stage: Stage) -> None:
    async def never() -> int:
        raise PermanentError("a command does not tell how many requests it has")

    stage.routed._requests = never
    assert await stage.waited_s() >= ROUTER_SILENT_S, "without a router nobody says so"
    await stage.router(HOME, 1)
    await stage.router(AWAY, None)
    later(5, lambda: stage.routed.answers.update({HOME: 0}))
    later(9, lambda: stage.routed.answers.update({AWAY: 0}))
    assert 9 <= await stage.waited_s() < 10


async def test_before_a_sleep_routers_are_asked_whether_they_know_until_it_is_not_wanted(
    stage: Stage,
) -> None:
    wanted = True

    async def is_wanted() -> bool:
        return wanted

    await stage.router(HOME, None)
    stage.in_engine = 2
    later(1, lambda: setattr(stage, "in_engine", 0))
    later(1.5, lambda: stage.routed.answers.update({HOME: 0}))
    begun_s = stage.runtime.clock.now_s()
    assert await stage.routed.wait_empty(is_wanted)
    assert 1.5 <= stage.runtime.clock.now_s() - begun_s < 2.5
    assert stage.routed.notices == {"falling_asleep"}
    assert stage.routed.held == 5, "it is not told to leave: its load counts as before"

    def gives_up() -> None:
        nonlocal wanted
        wanted = False

    stage.in_engine = 1
    later(1, gives_up)
    assert not await stage.routed.wait_empty(is_wanted)
    assert not await stage.routed.wait_empty(is_wanted)


async def test_the_routers_of_other_workers_are_not_asked(stage: Stage) -> None:
    await stage.router(HOME, 5, routes_to="OtherWorker")
    assert await stage.waited_s() < 0.5
    assert stage.routed.asked == 0


async def test_it_ends_at_once_when_every_router_has_said_that_it_has_nothing_here(stage: Stage) -> None:
    await stage.router(HOME, 0)
    await stage.router(AWAY, 0)
    assert await stage.waited_s() == 0
    assert stage.routed.asked == 2


async def test_without_routers_the_engine_must_be_empty_twice(stage: Stage) -> None:
    readings = iter([0, 1, 0, 0])

    async def requests() -> int:
        return next(readings)

    routed = RoutedRequests(stage.runtime, requests, WorkerLoad)
    await asyncio.wait_for(routed.wait_gone(), 5)
    assert next(readings, None) is None


async def test_a_router_that_does_not_answer_is_waited_for_until_the_engine_was_empty_for_a_while(
    stage: Stage,
) -> None:
    await stage.router(HOME, None)
    stage.in_engine = 1
    later(5, lambda: setattr(stage, "in_engine", 0))
    assert 5 + ROUTER_SILENT_S <= await stage.waited_s() < 5 + ROUTER_SILENT_S + 1.5


async def test_a_router_that_is_gone_from_discovery_is_not_waited_for(stage: Stage) -> None:
    key = await stage.router(HOME, 1)
    later(3, lambda: asyncio.ensure_future(stage.store.delete(key)))
    assert 3 <= await stage.waited_s() < 4


async def test_an_engine_that_does_not_tell_is_believed_to_be_empty_when_every_router_says_so(
    stage: Stage,
) -> None:
    stage.in_engine = None
    await stage.router(HOME, 1)
    later(3, lambda: stage.routed.answers.update({HOME: 0}))
    assert 3 <= await stage.waited_s() < 4
    stage.routed.answers[HOME] = None
    with pytest.raises(TimeoutError):
        await stage.waited_s()


async def test_an_engine_that_does_not_tell_is_believed_to_be_empty_when_no_router_is_left(
    stage: Stage,
) -> None:
    stage.in_engine = None
    key = await stage.router(HOME, None)
    later(3, lambda: asyncio.ensure_future(stage.store.delete(key)))
    assert 3 <= await stage.waited_s() < 3 + ROUTER_SILENT_S
    assert ROUTER_SILENT_S <= await stage.waited_s() < ROUTER_SILENT_S + 1.5


async def test_without_any_word_of_a_router_that_is_there_it_does_not_end(stage: Stage) -> None:
    stage.in_engine = None
    await stage.router(HOME, None)
    with pytest.raises(TimeoutError):
        await stage.waited_s()


async def test_a_worker_that_was_never_registered_has_nothing_to_wait_for(stage: Stage) -> None:
    stage.in_engine = None
    stage.runtime.instance_id = 0
    assert await stage.waited_s() == 0


async def test_what_is_held_is_counted_once(stage: Stage) -> None:
    assert stage.routed.held == 5  # before anybody was asked: as the engine told last
    await stage.router(HOME, 2)
    await stage.router(AWAY, 1)
    stage.in_engine = 3
    await stage.routed.refresh()
    assert stage.routed.held == 3
    stage.routed.answers[AWAY] = None
    await stage.routed.refresh()
    assert stage.routed.held == 3
    stage.in_engine = None
    await stage.routed.refresh()
    assert stage.routed.held == 2


async def test_routers_are_gone_once_there_were_some_and_for_a_while_there_are_none(stage: Stage) -> None:
    watch = RouterPresence(stage.runtime)
    loop = asyncio.get_running_loop()
    gone = asyncio.create_task(watch.wait_gone())
    await asyncio.sleep(10)
    assert not gone.done()  # nobody has been there yet: a graph without our Frontend
    key = await stage.router(HOME, 0, routes_to="OtherWorker")
    await asyncio.sleep(10)
    assert not gone.done()
    await stage.store.delete(key)
    begin_s = loop.time()
    await asyncio.wait_for(gone, 10)
    assert ROUTER_SILENT_S <= loop.time() - begin_s <= ROUTER_SILENT_S + 1
