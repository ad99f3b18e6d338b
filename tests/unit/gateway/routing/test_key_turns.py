"""Requests that bear keys take turns at workers: how many go there, whose is next, who waits without end."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from dynaplan.config.settings.frontend import FrontendSettings
from dynaplan.config.settings.keys import KeySettings
from dynaplan.gateway.keys.counts import KeyCounts
from dynaplan.gateway.keys.keyring import KeyHolder, KeyUse
from dynaplan.gateway.openai_api import COMPLETIONS, ApiError, Call
from dynaplan.gateway.routing.key_turns import Turn, Turns
from dynaplan.gateway.routing.worker_router import Booking, WorkerRouter
from tests.fakes.polling import eventually
from tests.unit.gateway.routing.test_worker_router import Instances, router, worker


class NoUsage:
    def add(self, *_: Any) -> None: ...


def holder(name: str) -> KeyHolder:
    return KeyHolder(KeySettings(name=name), KeyCounts(None, lambda: 0.0), cast(Any, NoUsage()))


class Box:
    """Workers with so many places each; ``ask`` is a request of a key that waits for one of them."""

    def __init__(self, places: int, workers: int = 1, frontends: int = 1) -> None:
        instances = Instances(*range(1, workers + 1))
        instances.now = tuple(
            replace(worker(each), card={"request_slots": places}) for each in range(1, workers + 1)
        )
        self.turns = Turns(frontends)
        settings = FrontendSettings(router="least-loaded")
        self.router: WorkerRouter = router(instances, settings, turns=self.turns)
        self.holders: dict[str, KeyHolder] = {}
        self.begun: list[str] = []
        self.bookings: dict[str, list[Booking]] = {}
        self.tasks: list[asyncio.Task[None]] = []

    def ask(self, key: str, times: int = 1, *, is_stream: bool = False, prompt_tokens: int = 10) -> None:
        for _ in range(times):
            call = Call(COMPLETIONS, b"", {}, "m", is_stream, "", prompt_tokens)
            use = KeyUse(self.holders.setdefault(key, holder(key)), call)
            self.tasks.append(asyncio.create_task(self._book(key, call, use)))

    async def _book(self, key: str, call: Call, use: KeyUse) -> None:
        turn = use.turn = Turn(key, 1.0, call.prompt_tokens, call.is_stream, self.turns)
        try:
            booking = await self.router.book(call, 0.0, turn=turn)
        finally:
            if turn.is_waiting:
                turn.leave()
        self.begun.append(key)
        self.bookings.setdefault(key, []).append(booking)

    def end(self, key: str) -> None:
        self.bookings[key].pop(0).close()

    def waiting(self, key: str) -> int:
        return sum(each.waiting for each in self.turns.of_keys() if each.key == key)


@asynccontextmanager
async def box(places: int, **more: int) -> Any:
    made = Box(places, **more)
    yield made
    for task in made.tasks:
        task.cancel()
    await asyncio.gather(*made.tasks, return_exceptions=True)


@pytest.mark.parametrize("workers", [1, 2])
async def test_workers_get_no_more_than_they_compute_at_once(workers: int) -> None:
    async with box(4, workers=workers) as here:
        here.ask("script", 20)
        await eventually(lambda: len(here.begun) == 4 * workers)
        assert here.waiting("script") == 20 - 4 * workers
        here.end("script")
        await eventually(lambda: len(here.begun) == 4 * workers + 1)


async def test_a_frontend_has_its_part_of_the_places() -> None:
    async with box(8, frontends=2) as here:
        here.ask("script", 20)
        await eventually(lambda: here.waiting("script") == 16)


async def test_who_has_nothing_there_comes_before_those_of_others_that_wait_for_long() -> None:
    async with box(4) as here:
        here.ask("script", 20)
        await eventually(lambda: len(here.begun) == 4)
        here.ask("person")
        await eventually(lambda: here.waiting("person") == 1)
        here.end("script")
        await eventually(lambda: len(here.begun) == 5)
        assert here.begun[-1] == "person"


async def test_a_place_is_kept_for_who_has_asked_lately() -> None:
    async with box(4) as here:
        here.ask("person")
        await eventually(lambda: here.begun == ["person"])
        here.end("person")
        here.ask("script", 20)
        await eventually(lambda: here.begun.count("script") == 3)
        assert here.waiting("script") == 17
        here.ask("person")
        await eventually(lambda: here.begun.count("person") == 2)


async def test_streams_without_a_first_token_are_few_and_those_with_one_make_room() -> None:
    async with box(100) as here:
        here.ask("script", 20, is_stream=True, prompt_tokens=1000)
        await eventually(lambda: len(here.begun) == 2)
        assert here.waiting("script") == 18
        here.bookings["script"][0].finish_prefill()
        await eventually(lambda: len(here.begun) == 3)
        here.ask("person", is_stream=True)  # has nothing there: no such bound
        await eventually(lambda: "person" in here.begun)


async def test_short_prompts_are_as_many_as_a_step_takes() -> None:
    async with box(100) as here:
        here.ask("script", 20, is_stream=True, prompt_tokens=100)
        await eventually(lambda: len(here.begun) == 10)
        assert here.waiting("script") == 10


async def test_one_that_gives_up_lets_the_next_one_go_on() -> None:
    async with box(1) as here:
        here.ask("a", 1)
        await eventually(lambda: here.begun == ["a"])
        here.ask("b", 1)
        here.ask("c", 1)
        await eventually(lambda: here.waiting("c") == 1)
        here.tasks[1].cancel()
        here.end("a")
        await eventually(lambda: here.begun == ["a", "c"])
        assert here.waiting("b") == 0


async def test_without_a_worker_the_deadline_holds() -> None:
    turns = Turns(1)
    routed = router(Instances(), FrontendSettings(), turns=turns)
    call = Call(COMPLETIONS, b"", {}, "m", False, "", 1)
    turn = Turn("a", 1.0, 1, is_stream=False, turns=turns)
    with pytest.raises(ApiError) as refusal:
        await routed.book(call, 0.0, turn=turn)
    assert refusal.value.status == 503
    turn.leave()  # as who books with it does
    assert [each.waiting for each in turns.of_keys()] == [0]


async def test_what_was_computed_counts_in_the_place_of_what_was_expected() -> None:
    async with box(1) as here:
        for answer_tokens in (1000, 10):
            key = f"k{answer_tokens}"
            call = Call(COMPLETIONS, b"", {}, "m", False, "", 10)
            use = KeyUse(here.holders.setdefault(key, holder(key)), call)
            use.turn = Turn(key, 1.0, 10, is_stream=False, turns=here.turns)
            (await here.router.book(call, 0.0, turn=use.turn)).close()
            use.end(10, answer_tokens, is_error=False)
        work = {each.key: each.work for each in here.turns.of_keys()}
        assert work["k1000"] / sum(work.values()) == pytest.approx(2010 / 2040, rel=0.01)
