"""The requests that wait for a model loaded on request, and the demand that the frontend publishes for them.

The frontend loads nothing: it publishes its *demand* (``contract/model_keys.py``), and the fleet plugin loads
the model, puts another one away for it, or says why it does not. What the plugin publishes ends a wait:

1. a worker is registered, and answers fewer than ``concurrency-limit``: the request goes to it;
2. the model's requests are refused, with a status and a sentence: that is the answer to those that came
   before;
3. its worker can never start: that is the answer as well;
4. ``load-timeout`` is over: 503.

A model whose worker leaves, for another model or by its ``ttl``, admits nothing more: its requests wait here
as well. While it waits, a client with a stream hears of the load in comments, which are no part of the
answer, so that nobody on the way takes the connection for dead.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dynaplan.config.settings.models import OnDemandSettings, ServedModel
from dynaplan.contract.absence import read_absence
from dynaplan.contract.model_keys import (
    MODEL_DEMAND,
    ModelDemand,
    ModelReport,
    demand_text,
    published_reports,
)
from dynaplan.gateway import timing
from dynaplan.gateway.openai_api import COMPLETIONS, ApiError, Call
from dynaplan.gateway.routing.key_turns import Turn
from dynaplan.gateway.routing.worker_router import Booking, FleetStatus, WorkerRouter
from dynaplan.models.model import ModelState
from dynaplan.store.model import Transaction
from dynaplan.util.errors import PermanentError, StoreUnavailable

if TYPE_CHECKING:
    from dynaplan.gateway.frontend_models import FrontendModel
    from dynaplan.worker.worker_runtime import WorkerRuntime

log = logging.getLogger(__name__)

Comment = Callable[[str], Awaitable[None]]
"""Sends a client a comment, which is no part of its answer."""

LOAD_ONLY_CALL = Call(COMPLETIONS, b"", {}, "", False, "", 0)
"""The request of somebody who wants the model loaded, and nothing computed."""


class ModelQueue(FleetStatus):
    """The queue of one model in one frontend. ``shows_lines``: its clients may see a failed model's log."""

    def __init__(
        self, model: ServedModel, unix_s: Callable[[], float] = time.time, *, shows_lines: bool = False
    ) -> None:
        # A worker may be starting at any time: this queue says when none will.
        super().__init__(is_worker_starting=True, wakes_on_demand=False)
        self._model = model
        self._settings = model.settings
        self._unix_s = unix_s
        self._shows_lines = shows_lines
        self._waiting: dict[int, float] = {}
        self._numbers = 0
        self._last_use_s = -math.inf
        self._was_idle = True
        self.was_reported = False
        self._is_removed = False
        self._keep_alive_s: float | None = None
        self.report: ModelReport | None = None
        self.changed: Callable[[], None] = lambda: None
        """Called when a request begins or ceases to wait, or the model was idle when ``demand`` was asked."""

    @property
    def settings(self) -> OnDemandSettings:
        return self._settings

    def follow_fleet(self, fleet: str) -> None:
        """Take over what the fleet plugin publishes of the model."""
        reports = published_reports(fleet)
        self.report = reports.get(self._model.name)
        self.was_reported |= self.report is not None
        self._is_removed = self.was_reported and bool(reports) and self.report is None
        self.absence = read_absence(fleet, self._model.component)

    def demand(self, in_flight: int) -> ModelDemand:
        """Return what this frontend has of the model's requests, given those that are answered now."""
        self._was_idle = not in_flight
        if in_flight:
            self._last_use_s = asyncio.get_running_loop().time()
        oldest_s = next(iter(self._waiting.values()), -math.inf)
        oldest, last_use = (self._to_unix_s(each_s) for each_s in (oldest_s, self._last_use_s))
        # Rounded, or each look would find another demand.
        return ModelDemand(
            len(self._waiting), round(oldest, 1), in_flight, round(last_use, 1), self._keep_alive_s
        )

    def _to_unix_s(self, loop_s: float) -> float:
        """Return a time of the event loop by the wall clock as it is set now; 0 for the infinite past.

        Times are kept on the loop's clock: when the wall clock is set, nobody has waited for longer.
        """
        return max(0.0, self._unix_s() - (asyncio.get_running_loop().time() - loop_s))

    def keep_alive(self, asked_s: float) -> None:
        """Have the model unloaded ``asked_s`` after its last use, if its ``ttl`` would keep it longer."""
        self._keep_alive_s = asked_s if asked_s < (self._settings.ttl_s or math.inf) else None
        self.changed()

    async def book(
        self,
        router: WorkerRouter,
        call: Call | None,
        comment: Comment | None,
        turn: Turn | None = None,
    ) -> Booking:
        """Book a worker of the model, once it has one; ``comment`` tells a client with a stream meanwhile.

        Raises ApiError when the model is not loaded in time, or not at all, or too many wait already.
        """
        self._last_use_s = asyncio.get_running_loop().time()
        self._keep_alive_s = None
        # Those who wait come first; between keys that is a matter of turns.
        booking = None if self._waiting and not turn else router.book_at_once(turn)
        if booking:
            if self._was_idle:
                self.changed()
            return booking
        with self._waits(is_first=turn is not None and turn.is_first_of_key()) as arrived_s:
            tells = comment if self._settings.loading_comments else None
            progress = LoadProgress(self, arrived_s, tells, has_turn=bool(turn))
            deadline_s = asyncio.get_running_loop().time() + self._settings.load_timeout_s
            booking = await router.book(call or LOAD_ONLY_CALL, deadline_s, progress.check, turn)
            self._last_use_s = asyncio.get_running_loop().time()
            return booking

    @contextmanager
    def _waits(self, *, is_first: bool) -> Iterator[float]:
        """Count a request as waiting; yields its arrival on the loop's clock. Raises ApiError (429).

        ``is_first``: no other request of its key waits, and even a full queue lets it in.
        """
        if len(self._waiting) >= self._settings.max_queue and not is_first:
            raise ApiError(
                429,
                f"{len(self._waiting)} requests wait for {self._model.name} already; try again",
                kind="rate_limit_exceeded",
                code="too_many_waiting",
                metric="overload",
                headers={"Retry-After": str(math.ceil(max(1.0, self.remaining_s() or 1.0)))},
            )
        number = self._numbers = self._numbers + 1
        arrived_s = self._waiting[number] = asyncio.get_running_loop().time()
        self.changed()
        try:
            yield arrived_s
        finally:
            del self._waiting[number]
            self.changed()

    def raise_if_refused(self, arrived_s: float, *, has_turn: bool = False) -> None:
        """Raise ApiError if a request that arrived then, on the loop's clock, is refused or has timed out.

        One that waits for its turn among keys (``has_turn``) does not time out while the model is loaded.
        """
        if self._is_removed:
            raise refused(404, f"{self._model.name} is not in the configuration any more", 0.0)
        refusal = self.report.refusal if self.report else None
        if refusal and self._to_unix_s(arrived_s) <= refusal.until_unix_s:
            why = f"{self._model.name}: {refusal.why}{self._last_lines()}"
            raise refused(refusal.status, why, refusal.retry_after_s)
        is_ready = self.report is not None and self.report.state == ModelState.READY.value
        if is_ready and has_turn:
            return
        # As a sum: the router's deadline is one, and must not be over before this says so.
        if asyncio.get_running_loop().time() >= arrived_s + self._settings.load_timeout_s:
            within = f"within {self._settings.load_timeout_s:g} s. Try again."
            what = (
                "had no place for it" if is_ready and self._settings.concurrency_limit else "was not loaded"
            )
            raise refused(503, f"{self._model.name} {what} {within}", 1.0)

    def _last_lines(self) -> str:
        """Return what a failed model's program wrote last, for clients that may know it."""
        lines = self.report.last_lines if self.report and self._shows_lines else ""
        return f". Its last lines:\n{lines}" if lines else ""

    def words(self) -> str:
        """Return a sentence on how the load goes, for a client that waits."""
        name, report = self._model.name, self.report
        if report and report.state == ModelState.READY.value and self._settings.concurrency_limit:
            return f"waiting for {name}, which answers others first (concurrency-limit)"
        if report is None or report.state != "loading":
            return f"waiting for {name}" + (f": {report.why}" if report and report.why else "")
        so_far_s = max(0.0, self._unix_s() - report.since_unix_s)
        usual = f" of about {report.load_s:.0f} s" if report.load_s else ""
        return f"loading {name}, {so_far_s:.0f} s{usual}"

    def remaining_s(self) -> float | None:
        """Return for how long the load will go on, if one does and that is known."""
        report = self.report
        if report is None or report.state != "loading" or not report.load_s:
            return None
        return max(0.0, report.since_unix_s + report.load_s - self._unix_s())


class LoadProgress:
    """One request's wait: refused in time, and told of the load."""

    def __init__(
        self, queue: ModelQueue, arrived_s: float, comment: Comment | None, *, has_turn: bool = False
    ) -> None:
        self._queue = queue
        self._has_turn = has_turn
        self._arrived_s = arrived_s
        self._comment = comment
        self._next_s = asyncio.get_running_loop().time() + timing.FIRST_COMMENT_S

    async def check(self) -> None:
        """Raise ApiError when the request is refused; send a comment when one is due."""
        self._queue.raise_if_refused(self._arrived_s, has_turn=self._has_turn)
        now_s = asyncio.get_running_loop().time()
        if self._comment and now_s >= self._next_s:
            self._next_s = now_s + timing.COMMENTS_S
            await self._comment(self._queue.words())


def refused(status: int, why: str, retry_after_s: float) -> ApiError:
    """Return the error of a request that the fleet plugin refuses: its model is not loaded, or pinned."""
    is_conflict = status == 409
    return ApiError(
        status,
        why,
        kind="invalid_request_error" if status < 500 else "service_unavailable",
        code="models_pinned" if is_conflict else "model_not_loaded",
        metric="unavailable",
        headers={"Retry-After": str(math.ceil(retry_after_s))} if retry_after_s else None,
    )


class DemandPublisher:
    """Keeps the key ``model_demand`` of this frontend, under its lease, up to date."""

    def __init__(self, runtime: WorkerRuntime, models: tuple[FrontendModel, ...]) -> None:
        self._runtime = runtime
        self._models = models
        self._changed = asyncio.Event()
        self._published: tuple[str, str] | None = None
        self._published_s = -math.inf
        for each in models:
            if each.queue:
                each.queue.changed = self._changed.set

    async def run(self) -> None:
        """Publish until cancelled: shortly after each change, and at least every DEMAND_INTERVAL_S."""
        while True:
            try:
                async with asyncio.timeout(timing.STORE_TIMEOUT_S):
                    await self.publish()
            except (TimeoutError, StoreUnavailable, PermanentError) as error:
                log.debug("the demand for models is not published: %s", error or "no answer")
            try:
                async with asyncio.timeout(timing.DEMAND_INTERVAL_S):
                    await self._changed.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(timing.DEMAND_DEBOUNCE_S)

    async def publish(self) -> None:
        """Write the demand to the store, unless the same was written in the last ``DEMAND_REWRITE_S``."""
        self._changed.clear()
        runtime = self._runtime
        if not runtime.instance_id:
            return
        demand = {each.name: each.queue.demand(each.router.in_flight) for each in self._models if each.queue}
        wanted = MODEL_DEMAND.key(runtime.namespace, runtime.instance_id), demand_text(demand)
        now_s = asyncio.get_running_loop().time()
        if wanted != self._published or now_s - self._published_s >= timing.DEMAND_REWRITE_S:
            await runtime.store.commit(Transaction(puts={wanted[0]: wanted[1]}, lease=runtime.instance_id))
            self._published, self._published_s = wanted, now_s
