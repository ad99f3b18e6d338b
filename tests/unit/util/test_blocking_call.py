from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from dynaplan.util.blocking_call import BlockingCall
from tests.fakes.polling import eventually


class Driver:
    """A GPU's driver: it answers while ``answers`` is set, as one of a broken GPU does not."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.reads = 0

    def read(self) -> int:
        self.reads += 1
        self.answers.wait()
        return self.reads


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.answers.set()


async def test_each_call_returns_a_new_read(driver: Driver) -> None:
    reading = BlockingCall(driver.read, 0)
    assert [await reading.latest_value(60) for _ in range(3)] == [1, 2, 3]


async def test_while_a_read_hangs_the_last_value_is_returned_and_nothing_more_is_read(driver: Driver) -> None:
    reading = BlockingCall(driver.read, 0)
    driver.answers.clear()
    assert [await reading.latest_value(0.01) for _ in range(3)] == [0, 0, 0]
    assert driver.reads == 1
    driver.answers.set()

    async def is_read_anew() -> bool:
        return await reading.latest_value(60) == 2

    await eventually(is_read_anew)


async def test_a_caller_that_leaves_ends_no_read(driver: Driver) -> None:
    reading = BlockingCall(driver.read, 0)
    driver.answers.clear()
    caller = asyncio.create_task(reading.latest_value(60))
    await eventually(lambda: driver.reads == 1)
    caller.cancel()
    driver.answers.set()
    assert await reading.latest_value(60) == 1


async def test_a_read_that_fails_leaves_the_last_value(caplog: pytest.LogCaptureFixture) -> None:
    numbers = iter([5])
    reading = BlockingCall(lambda: next(numbers), 0)
    assert [await reading.latest_value(60), await reading.latest_value(60)] == [5, 5]
    assert "a call failed" in caplog.text
