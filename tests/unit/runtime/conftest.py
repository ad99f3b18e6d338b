from __future__ import annotations

import asyncio

import pytest

from tests.unit.runtime.fake_store import FakeStore


class LoopClock:
    """The time of the running event loop: with looptime, hours pass in no time."""

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@pytest.fixture
def clock() -> LoopClock:
    return LoopClock()


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()
