"""The health watch: asks workers for their health, beside the fleet keeper's passes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from dynaplan.util.probe import health_answer

ASK_EVERY_S = 1.0
"""Time between two questions to a worker, and the longest time for an answer."""

FEWEST_QUESTIONS = 2
"""Unanswered questions that make a silence: one may be due to a standstill of this process itself."""


class HealthWatch:
    """Asks each worker once a second, and adds up the seconds in which it has said nothing at all.

    Any answer counts, "draining" too; and a silence counts only while the store answers, so that no
    worker is judged by an outage. ``wake`` is set after each silent second.
    """

    def __init__(self, is_store_there: Callable[[], Awaitable[bool]], wake: asyncio.Event) -> None:
        self._is_store_there = is_store_there
        self._wake = wake
        self._asking: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._silences: dict[tuple[str, str], int] = {}

    def watch(self, urls: Mapping[str, str]) -> None:
        """Ask these workers, by name, at these addresses, and forget all others."""
        wanted = set(urls.items())
        for worker in self._asking.keys() - wanted:
            self._asking.pop(worker).cancel()
            self._silences.pop(worker, None)
        for worker in wanted - self._asking.keys():
            self._asking[worker] = asyncio.create_task(self._ask_on(worker), name=f"health of {worker[0]}")

    @property
    def silent_s(self) -> dict[str, float]:
        """The silence of each worker by name: seconds of unanswered questions, not of time."""
        return {
            name: count * ASK_EVERY_S
            for (name, _), count in self._silences.items()
            if count >= FEWEST_QUESTIONS
        }

    async def close(self) -> None:
        """Break off every question about a worker's health."""
        asking = list(self._asking.values())
        self.watch({})
        await asyncio.gather(*asking, return_exceptions=True)

    async def _ask_on(self, worker: tuple[str, str]) -> None:
        now_s = asyncio.get_running_loop().time
        while True:
            next_s = now_s() + ASK_EVERY_S
            if await answers(worker[1], ASK_EVERY_S) or not await self._is_store_there():
                self._silences[worker] = 0
            else:
                await asyncio.sleep(max(0.0, next_s - now_s()))
                self._silences[worker] = self._silences.get(worker, 0) + 1
                self._wake.set()
            await asyncio.sleep(max(0.0, next_s - now_s()))


async def answers(url: str, within_s: float) -> bool:
    """Tell whether a worker says anything to ``GET {url}/health`` within that time, in seconds."""
    return (await health_answer(url, within_s)).startswith(b"HTTP/")
