"""Deadlines: when a call ends, and what is handed on of it. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from dynaplan.util.errors import DeadlineExceeded, UserError
from dynaplan.worker.deadlines import (
    NEVER,
    TIMEOUT_HEADER,
    deadline_after,
    deadline_scope,
    iterate_until,
    parse_deadline,
    timeout_headers,
)

pytestmark = pytest.mark.looptime


async def ticking(ended: list[str]) -> AsyncGenerator[int, None]:
    """An item a second."""
    try:
        for number in range(10):
            await asyncio.sleep(1)
            yield number
    except BaseException as error:
        ended.append(type(error).__name__)
        raise


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def test_items_come_until_the_deadline_and_then_the_source_is_cancelled() -> None:
    seen: list[int] = []
    ended: list[str] = []
    with pytest.raises(DeadlineExceeded, match="the endpoint has not answered in time"):
        async for item in iterate_until(now_s() + 2.5, ticking(ended), "the endpoint"):
            seen.append(item)
    assert (seen, ended) == ([0, 1], ["CancelledError"])


async def test_without_a_deadline_everything_comes() -> None:
    assert [item async for item in iterate_until(NEVER, ticking([]), "x")] == list(range(10))


async def test_the_reader_may_take_its_time_between_two_items() -> None:
    items = iterate_until(now_s() + 3, ticking([]), "x")
    assert await anext(items) == 0
    await asyncio.sleep(5)
    with pytest.raises(DeadlineExceeded):
        await anext(items)


async def test_a_timeout_of_the_source_itself_is_not_the_deadline() -> None:
    async def failing() -> AsyncGenerator[int, None]:
        raise TimeoutError("of its own")
        yield 1

    with pytest.raises(TimeoutError, match="of its own"):
        await anext(iterate_until(now_s() + 9, failing(), "x"))


async def test_a_reader_that_leaves_ends_the_source() -> None:
    ended: list[str] = []
    items = iterate_until(NEVER, ticking(ended), "x")
    await anext(items)
    await items.aclose()
    assert ended == ["GeneratorExit"]


async def test_a_call_made_while_answering_never_outlasts_the_request() -> None:
    assert deadline_after(None) == NEVER
    with deadline_scope(now_s() + 3):
        assert deadline_after(None) == now_s() + 3
        assert deadline_after(9) == now_s() + 3
        assert deadline_after(1) == now_s() + 1
        with deadline_scope(now_s() + 9):
            assert deadline_after(None) == now_s() + 3
    assert deadline_after(None) == NEVER


async def test_what_is_left_of_the_time_travels_as_milliseconds() -> None:
    assert timeout_headers(NEVER) == {}
    assert timeout_headers(now_s() + 1.5) == {TIMEOUT_HEADER: "1500"}
    assert timeout_headers(now_s() - 5) == {TIMEOUT_HEADER: "1"}
    assert parse_deadline("1500") == now_s() + 1.5
    assert parse_deadline("") == NEVER
    assert parse_deadline("9" * 400) > now_s() + 1e8


@pytest.mark.parametrize("text", ["soon", "-1", "1.5", "²"])
async def test_a_timeout_that_is_no_number_is_the_callers_fault(text: str) -> None:
    with pytest.raises(UserError, match=TIMEOUT_HEADER):
        parse_deadline(text)
