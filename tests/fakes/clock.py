"""Clocks for tests: one that a test moves, and one that goes with the event loop."""

from __future__ import annotations

import asyncio

TURNS_BEFORE_SLEEP_ENDS = 20


class ManualClock:
    """A clock that stands still until a test advances it, or until somebody sleeps on it."""

    def __init__(self, time_s: float = 1000.0) -> None:
        self.time_s = time_s

    def now_s(self) -> float:
        return self.time_s

    def advance(self, seconds: float) -> None:
        self.time_s += seconds

    async def sleep(self, seconds: float) -> None:
        """Let everything else that can run do so, and then let the time pass."""
        for _ in range(TURNS_BEFORE_SLEEP_ENDS):
            await asyncio.sleep(0)
        self.advance(seconds)


class LoopClock:
    """The time of the running event loop: with looptime, hours pass in no time."""

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
