"""The routers that send requests straight to this worker's engine, and when they do so no longer.

An engine with an HTTP port of its own refuses nobody, so it is stopped only when nobody sends it anything:

======================================  =======================================================
who                                     is done when
======================================  =======================================================
a router in discovery that answers      it routes nothing here and has nothing in flight here
a router that does not answer           it is gone from discovery, or the engine was empty for
                                        ``SILENT_S``
the engine                              it has no requests on two readings; one that does not
                                        tell is believed to be empty after ``SILENT_S``, when
                                        there are routers and all of them say so
======================================  =======================================================
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp

from dynaplan.domain.errors import TemporaryError
from dynaplan.domain.load import WorkerLoad
from dynaplan.runtime.client import worker_session
from dynaplan.runtime.process import WorkerRuntime

log = logging.getLogger(__name__)

ROUTES_TO = "routes_to"
"""The key of a router's card that names the component whose workers it sends requests to."""

ANSWER_S = 1.0
"""How long a router or the engine may take to answer one question."""

SILENT_S = 2.0
READINGS = 2
POLL_FIRST_S = 0.05
POLL_LONGEST_S = 0.5


@dataclass(frozen=True)
class Sight:
    """What one look saw, in numbers: the ``routers``, those that ``answered``, those that send here still.

    ``in_engine`` is None when the engine did not tell.
    """

    routers: int
    answered: int
    routing: int
    in_flight: int
    in_engine: int | None

    @property
    def held(self) -> int:
        """The requests here. The engine's are among those in flight, unless their router is gone."""
        return max(self.in_flight, self.in_engine or 0)

    def is_clear(self, quiet_s: float) -> bool:
        """Whether nothing is here or on its way; the engine has told of no request for ``quiet_s``."""
        if self.routing or self.held:
            return False
        if self.answered < self.routers:
            return self.in_engine == 0 and quiet_s >= SILENT_S
        return self.in_engine == 0 or (self.routers > 0 and quiet_s >= SILENT_S)


class RoutedRequests:
    """The requests of one worker whose engine gets them straight from the routers.

    ``requests`` asks the engine how many it has (TemporaryError when it does not tell), ``load`` is the load
    that it told last.
    """

    def __init__(
        self,
        runtime: WorkerRuntime,
        requests: Callable[[], Awaitable[int]],
        load: Callable[[], WorkerLoad],
    ) -> None:
        self._runtime = runtime
        self._requests = requests
        self._load = load
        self._sight: Sight | None = None

    @property
    def held(self) -> int:
        """The requests here: as the last look saw them, before the first one as the engine told last."""
        if self._sight:
            return self._sight.held
        load = self._load()
        return load.running_requests + load.waiting_requests

    async def look(self) -> None:
        """Ask every router and the engine, all at once."""
        self._sight = await self._seen()

    async def gone(self) -> None:
        """Return when no request is here and none can come any more. After the deregistration."""
        if not self._runtime.instance_id:
            return  # nobody was ever told of this worker
        clock = self._runtime.clock
        pause_s, clear, quiet_since_s = POLL_FIRST_S, 0, math.inf
        while True:
            self._sight = sight = await self._seen()
            now_s = clock.now_s()
            quiet_since_s = math.inf if sight.in_engine else min(quiet_since_s, now_s)
            clear = clear + 1 if sight.is_clear(now_s - quiet_since_s) else 0
            if clear == READINGS:
                return
            await clock.sleep(POLL_FIRST_S if clear else pause_s)
            pause_s = min(2 * pause_s, POLL_LONGEST_S)

    async def _seen(self) -> Sight:
        runtime = self._runtime
        wanted = runtime.component
        routers = {each.url for each in runtime.discovery.all() if each.card.get(ROUTES_TO) == wanted}
        async with worker_session(runtime.worker_token) as session:
            asked = asyncio.gather(*(self._routed(session, url) for url in routers))
            in_engine, answers = await asyncio.gather(self._in_engine(), asked)
        told = [answer for answer in answers if answer]
        return Sight(
            len(routers),
            len(told),
            sum(is_routed for is_routed, _ in told),
            sum(in_flight for _, in_flight in told),
            in_engine,
        )

    async def _routed(self, session: aiohttp.ClientSession, url: str) -> tuple[bool, int] | None:
        """Whether this router sends requests here, and how many it has here; None when it does not answer."""
        try:
            async with asyncio.timeout(ANSWER_S):
                async with session.get(f"{url}/routed/{self._runtime.instance_id:x}") as response:
                    response.raise_for_status()
                    answer = await response.json()
            return bool(answer["is_routed"]), int(answer["in_flight"])
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
            log.debug("the router at %s does not say what it sends here: %r", url, error)
            return None

    async def _in_engine(self) -> int | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._requests()
        except (TemporaryError, TimeoutError) as error:
            log.debug("the engine does not say what it has: %r", error)
            return None
