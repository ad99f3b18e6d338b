"""The routers that send requests straight to this worker's engine, and the proof that they have stopped.

An engine with an HTTP port of its own refuses no request, so it is stopped, or put to sleep, only when none
can come any more:

======================================  =======================================================
party                                   is done when
======================================  =======================================================
a router in discovery that answers      it has nothing in flight here; being asked, it sends nothing
                                        more (before a sleep: it has heard of it, and sends nothing)
a router that does not answer           it is gone from discovery, or the engine was empty for
                                        ``ROUTER_SILENT_S``
the engine                              it has no requests on one reading where there are routers and
                                        all have answered, else on two; one that does not answer is
                                        believed to be empty after ``ROUTER_SILENT_S``, when no
                                        router in discovery has anything in flight here or is
                                        silent; one that never counts its requests at once, where
                                        there are routers and all have answered
======================================  =======================================================

Without a router, as at the end of a deployment, nothing can be in flight: routers finish the requests that
they hold before they leave, and the requests of a killed router have lost their connection.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.http.client import HttpClient
from dynaplan.util.errors import PermanentError, TemporaryError
from dynaplan.worker.timing import (
    ROUTER_ANSWER_TIMEOUT_S,
    ROUTER_POLL_MAX_S,
    ROUTER_POLL_MIN_S,
    ROUTER_SILENT_S,
)
from dynaplan.worker.worker_runtime import WorkerRuntime

log = logging.getLogger(__name__)

ROUTES_TO = "routes_to"
"""The key of a router's card that names the component whose workers it sends requests to."""

EVERY_COMPONENT = "*"
"""The value of a router that sends requests to the workers of several models."""

EMPTY_READINGS = 2

LEAVING = "leaving"
"""What a router is told: the worker leaves; it routes nothing more there."""

FALLING_ASLEEP = "falling_asleep"
"""What a router is asked: whether it knows that the worker is to sleep; one that does not gives no number."""


@dataclass(frozen=True)
class InFlightReport:
    """The number of ``routers``, how many of them ``answered``, and the requests that they have in flight
    here.

    ``in_engine`` is None when the engine did not answer, or never counts its requests (``is_counted``).
    """

    routers: int
    answered: int
    in_flight: int
    in_engine: int | None
    is_counted: bool = True

    @property
    def held(self) -> int:
        """The number of requests here: by the routers' count or the engine's, whichever is higher.

        The engine's requests are among the routers', unless a router is gone.
        """
        return max(self.in_flight, self.in_engine or 0)

    @property
    def have_routers_answered(self) -> bool:
        """Whether there are routers and all have answered: then they know all requests, and send no more."""
        return 0 < self.routers == self.answered

    def is_clear(self, quiet_s: float) -> bool:
        """Tell whether no request is here or on its way.

        ``quiet_s`` is for how many seconds the engine has reported none.
        """
        if self.held:
            return False
        have_all_answered, is_empty = self.answered == self.routers, self.in_engine == 0
        if have_all_answered and (is_empty or (self.have_routers_answered and not self.is_counted)):
            return True
        return (have_all_answered or is_empty) and quiet_s >= ROUTER_SILENT_S


class RouterPresence:
    """The presence of routers of any component, watched from the beginning of a worker's life."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self._were_present = False
        runtime.discovery.on_change(self._note)
        self._note()

    async def wait_gone(self) -> None:
        """Return when there have been routers, and none for the last ``ROUTER_SILENT_S`` seconds.

        Then no process is left that could send a request, with a hand-off of ours or without.
        """
        clock = self._runtime.clock
        since_s = math.inf
        while True:
            now_s = clock.now_s()
            since_s = min(since_s, now_s) if self._were_present and not self._are_present() else math.inf
            if now_s - since_s >= ROUTER_SILENT_S:
                return
            await clock.sleep(ROUTER_POLL_MAX_S)

    def _note(self) -> None:
        self._were_present |= self._are_present()

    def _are_present(self) -> bool:
        return any(ROUTES_TO in each.card for each in self._runtime.discovery.all())


class RoutedRequests:
    """The requests of one worker whose engine gets them straight from the routers.

    ``requests`` asks the engine how many it has (TemporaryError when it does not answer, PermanentError when
    it never counts them), ``load`` is the load that it reported last.
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
        self._report: InFlightReport | None = None
        self._is_counted = True

    @property
    def held(self) -> int:
        """The number of requests here, as of the last ``refresh``; before the first, by the engine's load."""
        if self._report:
            return self._report.held
        load = self._load()
        return load.running_requests + load.waiting_requests

    async def refresh(self) -> None:
        """Ask every router and the engine, all at once; the routers send nothing more from then on."""
        self._report = await self._ask_all(LEAVING)

    async def wait_gone(self) -> None:
        """Return when no request is here and no router can send another. For after the deregistration."""
        if not self._runtime.instance_id:
            return  # it has never been registered
        async for report in self._reports(LEAVING):
            self._report = report

    async def wait_empty(self, is_wanted: Callable[[], Awaitable[bool]]) -> bool:
        """Return True when no request is here and no router sends another, as it has heard of the sleep.

        False as soon as the sleep is not wanted any more.
        """
        if not await is_wanted():
            return False
        async for _ in self._reports(FALLING_ASLEEP):
            if not await is_wanted():
                return False
        return True

    async def _reports(self, notice: str) -> AsyncIterator[InFlightReport]:
        """Yield what routers and engine report, again and again until nothing is here or on its way."""
        clock = self._runtime.clock
        pause_s, clear, quiet_since_s = ROUTER_POLL_MIN_S, 0, math.inf
        while True:
            report = await self._ask_all(notice)
            yield report
            now_s = clock.now_s()
            quiet_since_s = math.inf if report.in_engine else min(quiet_since_s, now_s)
            clear = clear + 1 if report.is_clear(now_s - quiet_since_s) else 0
            if clear == EMPTY_READINGS or (clear and report.have_routers_answered):
                return
            await clock.sleep(ROUTER_POLL_MIN_S if clear else pause_s)
            pause_s = min(2 * pause_s, ROUTER_POLL_MAX_S)

    async def _ask_all(self, notice: str) -> InFlightReport:
        runtime = self._runtime
        wanted = runtime.component, EVERY_COMPONENT
        routers = {each.url for each in runtime.discovery.all() if each.card.get(ROUTES_TO) in wanted}
        async with HttpClient(runtime.worker_token, runtime.client_tls) as http:
            asked = asyncio.gather(*(self._notify_router(http, url, notice) for url in routers))
            in_engine, answers = await asyncio.gather(self._count_in_engine(), asked)
        answered = [answer for answer in answers if answer is not None]
        return InFlightReport(len(routers), len(answered), sum(answered), in_engine, self._is_counted)

    async def _notify_router(self, http: HttpClient, url: str, notice: str) -> int | None:
        """Post the notice about this worker to a router.

        Return how many requests the router has in flight here; None without an answer.
        """
        try:
            where = f"{url}/{notice}/{self._runtime.instance_id:x}"
            answer = await http.request("POST", where, timeout_s=ROUTER_ANSWER_TIMEOUT_S)
            return int(answer.checked().json()["in_flight"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.debug("the router at %s does not report its requests here: %r", url, error)
            return None

    async def _count_in_engine(self) -> int | None:
        try:
            async with asyncio.timeout(ROUTER_ANSWER_TIMEOUT_S):
                return await self._requests()
        except (TemporaryError, TimeoutError) as error:
            log.debug("the engine does not report its requests: %r", error)
        except PermanentError:
            self._is_counted = False
        return None
