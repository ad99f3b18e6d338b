"""Who is taken for a worker that stands still, and what becomes of its requests."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.config.settings.frontend import FrontendSettings
from dynaplan.gateway.routing.stalled_workers import StalledWorkers
from dynaplan.http.connections import Origin, target_of
from dynaplan.store.instances import Instance
from tests.unit.gateway.routing.test_worker_router import Instances, router

pytestmark = pytest.mark.looptime


def worker(number: int) -> Instance:
    return Instance("ns", "W", "generate", number, f"http://127.0.0.1:{9000 + number}", f"w{number}")


ONE, OTHER = worker(1), worker(2)


class Silence:
    """The upstream's part: who owes answers and is silent, and who answers ``/health``."""

    def __init__(self) -> None:
        self.silent: set[Origin] = set()
        self.stopped: set[str] = set()
        self.asked: list[str] = []
        self.moved: list[Origin] = []
        self.is_used, self.looks = asyncio.Event(), 0

    async def wait_for_use(self) -> None:
        await self.is_used.wait()

    def silent_origins(self) -> set[Origin]:
        self.looks += 1
        return set(self.silent)

    async def is_answering(self, url: str, timeout_s: float) -> bool:
        self.asked.append(url)
        if url in self.stopped:
            await asyncio.sleep(timeout_s)
            return False
        return True

    def break_off_movable(self, origin: Origin, reason: str) -> None:
        self.moved.append(origin)

    def stop(self, instance: Instance) -> None:
        self.silent.add(target_of(instance.openai_url).origin)
        self.stopped.add(instance.openai_url)

    def go_on(self, instance: Instance) -> None:
        self.silent.clear()
        self.stopped.clear()


class Waits:
    """What waits for a first token, by the calls that break it off."""

    def __init__(self) -> None:
        self.broken_off: list[frozenset[int]] = []

    def break_off(self, instance_ids: frozenset[int], reason: str) -> None:
        self.broken_off.append(instance_ids)


class Watched:
    """A frontend that looks twice a second."""

    def __init__(self, migration_stall_s: float = 5.0) -> None:
        self.upstream, self.waits = Silence(), Waits()
        self.stalled = StalledWorkers(self.upstream, self.waits, migration_stall_s)  # type: ignore[arg-type]

    async def look(self, *group: Instance, for_s: float) -> Any:
        for _ in range(round(for_s / 0.5)):
            await asyncio.sleep(0.5)
            self.stalled.look([group])
        await asyncio.sleep(0.01)
        return self.stalled.ids


async def test_a_silent_worker_that_answers_no_health_is_stalled_and_who_waits_there_goes_elsewhere() -> None:
    watched = Watched()
    watched.upstream.stop(ONE)
    assert await watched.look(ONE, OTHER, for_s=1.5) == set()
    assert await watched.look(ONE, OTHER, for_s=1.5) == {1}
    assert watched.waits.broken_off == [{1}]
    assert watched.upstream.moved == []


async def test_nothing_is_looked_at_while_no_worker_owes_an_answer_or_is_stalled() -> None:
    watched = Watched()
    watch = asyncio.ensure_future(watched.stalled.watch(lambda: [[ONE, OTHER]], lambda _: True))
    await asyncio.sleep(60)
    assert watched.upstream.looks == 0
    watched.upstream.is_used.set()
    watched.upstream.stop(ONE)
    await asyncio.sleep(5)
    assert watched.stalled.ids == {1}
    watched.upstream.is_used.clear()
    watched.upstream.go_on(ONE)
    await asyncio.sleep(60)
    assert watched.stalled.ids == set()
    assert watched.upstream.looks < 20
    watch.cancel()


async def test_one_that_is_silent_and_answers_is_asked_again_and_never_stalled() -> None:
    watched = Watched()
    watched.upstream.silent.add(target_of(ONE.openai_url).origin)
    assert await watched.look(ONE, OTHER, for_s=60) == set()
    assert len(watched.upstream.asked) > 10


async def test_streams_move_when_the_time_for_that_is_over() -> None:
    watched = Watched(migration_stall_s=5.0)
    watched.upstream.stop(ONE)
    await watched.look(ONE, OTHER, for_s=6.5)
    assert watched.upstream.moved == []
    await watched.look(ONE, OTHER, for_s=2)
    assert set(watched.upstream.moved) == {target_of(ONE.openai_url).origin}


async def test_the_only_worker_is_not_judged_nor_the_last_one_that_moves() -> None:
    watched = Watched()
    watched.upstream.stop(ONE)
    assert await watched.look(ONE, for_s=10) == set()
    watched.upstream.stop(OTHER)
    assert await watched.look(ONE, OTHER, for_s=0.5) == set()
    assert len(await watched.look(ONE, OTHER, for_s=30)) == 1


async def test_of_two_that_stop_at_once_one_stays_and_nothing_moves_to_and_fro() -> None:
    watched = Watched(migration_stall_s=0.0)
    watched.upstream.stop(ONE)
    watched.upstream.stop(OTHER)
    assert len(await watched.look(ONE, OTHER, for_s=30)) == 1
    assert len(set(watched.upstream.moved)) == 1


async def test_a_stalled_worker_gets_nothing_while_another_is_there_be_it_full() -> None:
    stalled = SimpleNamespace(ids=frozenset({1}))
    routed = router(Instances(1, 2), FrontendSettings(router="round-robin"), stalled=stalled, limit=1)
    first = routed.book_at_once()
    assert first
    assert first.instance.instance_id == 2
    assert routed.book_at_once() is None
    stalled.ids = frozenset({1, 2})
    assert routed.book_at_once()


async def test_a_stalled_worker_is_back_with_its_first_answer() -> None:
    watched = Watched()
    watched.upstream.stop(ONE)
    await watched.look(ONE, OTHER, for_s=4)
    watched.upstream.go_on(ONE)
    assert await watched.look(ONE, OTHER, for_s=2) == set()


async def test_a_stalled_worker_that_has_left_is_forgotten() -> None:
    watched = Watched()
    watched.upstream.stop(ONE)
    await watched.look(ONE, OTHER, for_s=4)
    assert await watched.look(OTHER, for_s=0.5) == set()
