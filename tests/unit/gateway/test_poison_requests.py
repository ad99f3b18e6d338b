"""One poison request among good ones is found within few deaths, and no good one is refused for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing

import pytest

from dynaplan.gateway.openai_api import CHAT_COMPLETIONS, ApiError, Call
from dynaplan.gateway.poison_requests import MAX_HASHES, REFUSE_S, PoisonRequests, Suspect
from dynaplan.store.instances import Instance


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def call(text: str) -> Call:
    document = {"model": "a/model", "messages": [{"role": "user", "content": text}]}
    return Call(CHAT_COMPLETIONS, json.dumps(document).encode(), document, "a/model", True, text, 1)


def instance(number: int, pid: int = 7) -> Instance:
    return Instance("ns", "VllmWorker", "generate", number, f"http://127.0.0.1:{8000 + pid}", pid=pid)


async def in_flight(stack: ExitStack, poison: PoisonRequests, text: str, at: Instance) -> Suspect:
    suspect = stack.enter_context(closing(await poison.admit(call(text))))
    suspect.sent_to(at)
    return suspect


async def death(poison: PoisonRequests, pid: int, *texts: str) -> None:
    """A worker of that pid dies with these requests in flight; each of them reports it."""
    with ExitStack() as stack:
        for suspect in [await in_flight(stack, poison, text, instance(pid, pid)) for text in texts]:
            suspect.worker_died()


async def answer(poison: PoisonRequests, text: str) -> None:
    with closing(await poison.admit(call(text))) as suspect:
        suspect.sent_to(instance(99, 99))
        poison.clear(suspect.call)


async def is_refused(poison: PoisonRequests, text: str) -> bool:
    try:
        with closing(await poison.admit(call(text))):
            return False
    except ApiError as error:
        assert "Workers have died over this request" in str(error)
        return True


@asynccontextmanager
async def isolated(poison: PoisonRequests, text: str) -> AsyncIterator[bool]:
    """Tell whether the request is isolated; no other one may be."""
    with closing(await poison.admit(call(text))):
        yield poison._isolation.locked()


async def test_a_request_that_was_alone_at_two_deaths_is_refused_and_no_other_one() -> None:
    poison = PoisonRequests(Clock())
    await death(poison, 1, "poison")
    assert not await is_refused(poison, "poison")
    await death(poison, 2, "poison", "innocent")
    assert await is_refused(poison, "poison")
    assert not await is_refused(poison, "innocent")


async def test_a_suspect_of_two_deaths_among_others_is_refused_after_the_third() -> None:
    poison = PoisonRequests(Clock())
    await death(poison, 1, "poison", "a")
    await death(poison, 2, "poison", "b")
    assert not await is_refused(poison, "poison")
    await death(poison, 3, "poison", "c")
    assert await is_refused(poison, "poison")


async def test_two_suspects_of_one_death_are_not_refused() -> None:
    poison = PoisonRequests(Clock())
    for pid in (1, 2):
        await death(poison, pid, "a", "b")
    with ExitStack() as stack:
        begun = await in_flight(stack, poison, "a", instance(3, 3))
        begun.begin_answer()
        await in_flight(stack, poison, "b", instance(3, 3))
        begun.worker_died()
    assert not await is_refused(poison, "a")
    assert not await is_refused(poison, "b")


async def test_equal_requests_at_one_death_are_not_one_that_was_alone() -> None:
    poison = PoisonRequests(Clock())
    await death(poison, 1, "a", "a")
    await death(poison, 2, "a")
    assert not await is_refused(poison, "a")


async def test_a_body_that_is_answered_in_between_does_not_collect_deaths() -> None:
    poison = PoisonRequests(Clock())
    for pid in range(10):
        await death(poison, pid, "a")
        assert not await is_refused(poison, "a")
        await answer(poison, "a")


async def test_the_slowest_of_many_requests_is_not_refused_for_deaths_that_none_has_caused() -> None:
    poison = PoisonRequests(Clock())
    for pid in (1, 2):
        await death(poison, pid, "slow", "a", "b")
    for text in "ab":
        await answer(poison, text)
    assert not await is_refused(poison, "slow")


async def test_a_suspect_of_one_death_with_others_is_not_isolated_and_one_of_two_is() -> None:
    poison = PoisonRequests(Clock())
    await death(poison, 1, "a", "b")
    async with isolated(poison, "a") as is_isolated:
        assert not is_isolated
    await death(poison, 2, "a", "c")
    async with isolated(poison, "a") as is_isolated:
        assert is_isolated
    async with isolated(poison, "b") as is_isolated:
        assert not is_isolated


async def test_suspects_are_tried_one_after_the_other_from_answer_to_answer() -> None:
    poison = PoisonRequests(Clock())
    for pid in (1, 2):
        await death(poison, pid, "a", "b")
    with ExitStack() as stack:
        first = await in_flight(stack, poison, "a", instance(3, 3))
        second = asyncio.create_task(poison.admit(call("b")))
        await asyncio.sleep(0)
        assert not second.done()
        first.begin_answer()
        (await second).close()


async def test_a_request_that_waited_for_an_equal_one_is_refused_with_it() -> None:
    poison = PoisonRequests(Clock())
    await death(poison, 1, "poison")
    with ExitStack() as stack:
        first = await in_flight(stack, poison, "poison", instance(2, 2))
        second = asyncio.create_task(is_refused(poison, "poison"))
        await asyncio.sleep(0)
        first.worker_died()
        first.close()
        assert await second


async def test_a_worker_that_has_registered_again_dies_once_and_with_all_its_requests() -> None:
    poison = PoisonRequests(Clock())
    with ExitStack() as stack:
        before = await in_flight(stack, poison, "a", instance(1))
        after = await in_flight(stack, poison, "b", instance(2))
        for each in (before, after):
            each.worker_died()
    await death(poison, 7, "c")  # sent to it in the moment of its death
    assert [(each.deaths, each.was_alone) for each in poison.evidence.values()] == [(1, False)] * 2
    assert not poison.in_flight


async def test_evidence_is_forgotten_and_bounded() -> None:
    clock = Clock()
    poison = PoisonRequests(clock)
    for pid in (1, 2):
        await death(poison, pid, "poison")
    clock.now_s += REFUSE_S
    assert await is_refused(poison, "poison")
    clock.now_s += 1.0
    assert not await is_refused(poison, "another")
    assert not poison.evidence, "and no body is hashed again"
    assert not await is_refused(poison, "poison")
    for pid in range(2 * MAX_HASHES):
        await death(poison, pid + 10, str(pid))
    assert len(poison.evidence) == MAX_HASHES


async def test_no_body_is_hashed_before_a_worker_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    poison = PoisonRequests(Clock())
    monkeypatch.setattr("dynaplan.gateway.poison_requests._hash", None)
    await answer(poison, "a")
    assert not poison.in_flight


async def test_an_answer_that_has_begun_goes_on_and_the_next_request_of_its_body_is_refused() -> None:
    poison = PoisonRequests(Clock())
    for pid in range(1, 4):
        with closing(await poison.admit(call("a long answer"), has_begun=pid > 1)) as suspect:
            suspect.sent_to(instance(pid, pid))
            suspect.worker_died()
    with closing(await poison.admit(call("a long answer"), has_begun=True)):
        assert await is_refused(poison, "a long answer")
    await answer_rest(poison, "a long answer")
    assert not await is_refused(poison, "a long answer")


async def answer_rest(poison: PoisonRequests, text: str) -> None:
    with closing(await poison.admit(call(text), has_begun=True)) as suspect:
        suspect.sent_to(instance(99, 99))
        poison.clear(suspect.call)
