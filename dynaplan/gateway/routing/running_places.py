"""Holds requests back in front of workers that run as many as a planner wants there.

When that is worth it is pure: ``routing/hold_back.py``. Requests wait in the order of arrival, at most
for the limit's ``wait_s``, and none is refused or lost: with its time over a request goes to a worker all the
same. Requests that bear keys wait for their turn instead (``key_turns.py``).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from dynaplan.config.settings.frontend import part_of_limit
from dynaplan.contract.running_limits import RunningLimit
from dynaplan.routing.hold_back import free_places, must_wait

log = logging.getLogger(__name__)


class RunningPlaces:
    """The places at the workers of one component; ``frontends`` share them.

    ``running`` returns what this frontend has at each worker that may get requests now.
    """

    def __init__(self, frontends: int, running: Callable[[], Sequence[int]]) -> None:
        self._frontends = frontends
        self._running = running
        self.waiting: deque[asyncio.Future[None]] = deque()
        """The requests that are held back now."""
        self._text = ""
        self.limit: RunningLimit | None = None

    def follow(self, text: str) -> None:
        """Take over the limit as it is published; empty for none."""
        if text == self._text:
            return
        self._text, self.limit = text, None
        try:
            self.limit = self._part_of(RunningLimit.from_text(text)) if text else None
        except ValueError as error:
            log.warning("ignoring a limit of running requests: %s", error)
        self.wake()

    def _part_of(self, limit: RunningLimit) -> RunningLimit:
        """Return this frontend's part of the limit."""
        most = part_of_limit(limit.most, self._frontends)
        return replace(limit, most=most, ends_per_s=limit.ends_per_s / self._frontends)

    def would_hold_back(self) -> bool:
        """Tell whether a request that came now would wait for a place."""
        limit, running = self.limit, self._running()
        return limit is not None and bool(running) and must_wait(limit, running, len(self.waiting))

    async def wait(
        self,
        deadline_s: float,
        next_look_s: Callable[[float], float],
        check: Callable[[], Awaitable[None]] | None,
    ) -> bool:
        """Wait until a request may go to a worker; False at once where it is not held back.

        At the deadline it may, too. It looks by itself for a place when ``next_look_s`` of the time says, and
        awaits ``check``, which may end the wait by an error. All times are on the loop's clock.
        """
        limit = self.limit
        if limit is None or not self.would_hold_back():
            return False
        loop = asyncio.get_running_loop()
        place = loop.create_future()
        until_s = min(deadline_s, loop.time() + limit.wait_s)
        self.waiting.append(place)
        try:
            while not place.done() and (now_s := loop.time()) < until_s:
                await asyncio.wait((place,), timeout=min(until_s, next_look_s(now_s)) - now_s)
                if check and not place.done():
                    await check()
                self.wake()
        finally:
            self.waiting.remove(place)
            loop.call_soon(self.wake)  # when this one is booked, or has left its place to another
        return True

    def wake(self) -> None:
        """Let those that wait go to the places that are free; all of them where the limit is gone."""
        if self.waiting:
            free = free_places(self.limit, self._running()) if self.limit else len(self.waiting)
            for place in list(self.waiting)[: max(0, free)]:
                if not place.done():
                    place.set_result(None)
