"""Detecting processes that run and do nothing.

1. ``StallDetector``: processes of dynaplan's own, whose heartbeat does not move.
2. ``HealthPoll``: workers, which are asked for their health beside the reconciler's passes.

Both count seconds in which this process went on itself, so that a machine that stood still accuses nobody
(docs/decisions/0017).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from dynaplan.http.client import try_get
from dynaplan.process.heartbeats import Heartbeats
from dynaplan.util.clock import Clock

MAX_STEP_S = 2.0
"""The most that one poll adds to a silence, in seconds: a detector that stood still itself accuses nobody."""

HEALTH_POLL_S = 1.0
"""Time between two questions to a worker, and the longest time for an answer."""

MIN_UNANSWERED = 2
"""Unanswered questions that make a silence: one may be due to a stall of this process itself."""


@dataclass
class _Silence:
    beat_s: float
    polled_s: float
    seconds: float = 0.0


class StallDetector:
    """Adds up the seconds for which a heartbeat has not moved, while this process went on itself."""

    def __init__(self, heartbeats: Heartbeats, clock: Clock) -> None:
        self._heartbeats = heartbeats
        self._clock = clock
        self._silences: dict[str, _Silence] = {}

    def overdue_s(self, name: str, pid: int) -> float:
        """The silence of that process beyond its interval, in seconds; 0 when it has not beaten yet."""
        heartbeat, now_s = self._heartbeats.read(name), self._clock.now_s()
        if heartbeat is None or heartbeat.process.pid != pid:
            self._silences.pop(name, None)
            return 0.0
        silence = self._silences.get(name)
        if silence is None or silence.beat_s != heartbeat.beat_s:
            silence = self._silences[name] = _Silence(heartbeat.beat_s, now_s)
        silence.seconds += min(now_s - silence.polled_s, MAX_STEP_S)
        silence.polled_s = now_s
        return max(0.0, silence.seconds - heartbeat.every_s)


class HealthPoll:
    """Polls each worker once a second, and adds up the seconds without any answer.

    Any answer counts, "draining" too; and a silence counts only while the store answers, so that no
    worker is judged by an outage. ``wake`` is set after each silent second.
    """

    def __init__(self, is_store_there: Callable[[], Awaitable[bool]], wake: asyncio.Event) -> None:
        self._is_store_there = is_store_there
        self._wake = wake
        self._polls: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._silences: dict[tuple[str, str], int] = {}

    def poll(self, urls: Mapping[str, str]) -> None:
        """Poll these workers, by name, at these addresses, and no others."""
        wanted = set(urls.items())
        for worker in self._polls.keys() - wanted:
            self._polls.pop(worker).cancel()
            self._silences.pop(worker, None)
        for worker in wanted - self._polls.keys():
            self._polls[worker] = asyncio.create_task(self._poll(worker), name=f"health of {worker[0]}")

    @property
    def silent_s(self) -> dict[str, float]:
        """The silence of each worker by name: seconds of unanswered polls, not of time."""
        return {
            name: count * HEALTH_POLL_S
            for (name, _), count in self._silences.items()
            if count >= MIN_UNANSWERED
        }

    async def close(self) -> None:
        polls = list(self._polls.values())
        self.poll({})
        await asyncio.gather(*polls, return_exceptions=True)

    async def _poll(self, worker: tuple[str, str]) -> None:
        now_s = asyncio.get_running_loop().time
        while True:
            next_s = now_s() + HEALTH_POLL_S
            if await answers(worker[1], HEALTH_POLL_S) or not await self._is_store_there():
                self._silences[worker] = 0
            else:
                await asyncio.sleep(max(0.0, next_s - now_s()))
                self._silences[worker] = self._silences.get(worker, 0) + 1
                self._wake.set()
            await asyncio.sleep(max(0.0, next_s - now_s()))


async def answers(url: str, within_s: float) -> bool:
    """Tell whether a worker answers anything to ``GET {url}/health`` within that time, in seconds."""
    return await try_get(f"{url}/health", timeout_s=within_s) is not None
