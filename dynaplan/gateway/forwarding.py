"""Lead one request to a worker, and to the next one when that fails.

Nothing is sent to the client before the first token of a worker's answer has arrived. Until then another
worker can take over, and the client sees a longer TTFT but no error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from dynaplan.engines.api_rules import EngineApi
from dynaplan.gateway.answering import NO_BOUNDS, Exchange, beginning, broken_off, streamed, whole
from dynaplan.gateway.kv_routing.whole_answers import WholeAnswers
from dynaplan.gateway.migration.partial_answers import UnreadPages
from dynaplan.gateway.openai_api import (
    ApiError,
    bad_request,
    check_fields,
    no_worker,
    out_of_descriptors,
    worker_failed,
)
from dynaplan.gateway.prefill.hand_off import HandOff
from dynaplan.gateway.prefill.remote_prefill import RemotePrefill
from dynaplan.gateway.routing.reservation import Reservations
from dynaplan.gateway.routing.worker_router import Booking, WorkerRouter
from dynaplan.gateway.stream_events import WholeLines
from dynaplan.gateway.trials import Trials
from dynaplan.gateway.upstream import Upstream, WorkerDied, WorkerRefused, read_whole
from dynaplan.store.instances import Instance
from dynaplan.util.descriptors import descriptor_limit, is_exhausted
from dynaplan.util.http_routes import REQUEST_ID
from dynaplan.worker.named_requests import attempt_id, name_of

log = logging.getLogger(__name__)

MOST_DEATHS = 3
"""Workers that may fail over one request before it is answered 502: the request itself may be the cause."""

_NO_MEDIA = b"input is not supported"
"""llama.cpp's words, with status 500, for an image without a projector."""

_ONLY_REMOTE = (
    "The decode workers here cannot compute a prompt, and images, sounds, lists of prompts and other paths "
    "than completions are not computed for them. Send one prompt of text."
)


class Forwarder:
    """Answers requests through the workers that the router chooses.

    ``worker_wait_s`` is how long one attempt waits for a free worker, counted anew after each failure;
    ``forgive`` is told the dead instances of whose deaths requests are the cause; ``engine_api`` describes
    the API of the engine of that name. A stream goes on at another worker ``migration_limit`` times at most.
    ``served`` is told, of each answered request, the instance that had
    its prompt and the tokens of it that were cached there.
    """

    def __init__(
        self,
        upstream: Upstream,
        router: WorkerRouter,
        prefill: RemotePrefill,
        reservations: Reservations,
        *,
        worker_wait_s: float,
        migration_limit: int = 0,
        forgive: Callable[[frozenset[int]], None] = lambda dead: None,
        engine_api: Callable[[str], EngineApi] = lambda name: NO_BOUNDS,
        served: Callable[[int, int], None] = lambda instance_id, tokens: None,
    ) -> None:
        self._upstream = upstream
        self._router = router
        self._prefill = prefill
        self._reservations = reservations
        self._worker_wait_s = worker_wait_s
        self._migration_limit = migration_limit
        self._pages = UnreadPages()
        self._now_s: Callable[[], float] = asyncio.get_running_loop().time
        self._engine_api = engine_api
        self._served = served
        self._apis: dict[str, EngineApi] = {}
        self._trials = Trials(self._now_s, forgive)
        self._whole = WholeAnswers(self._now_s)
        self.fell_asleep = self._trials.fell_asleep

    async def answer(self, exchange: Exchange) -> web.StreamResponse:
        """Return the worker's answer (a stream is sent already); raise ApiError when no worker gives one."""
        is_answered = False
        exchange.migration_limit, exchange.pages = self._migration_limit, self._pages
        try:
            response = await self._answer(exchange)
            is_answered = not exchange.failure
            return response
        except ApiError as error:
            if exchange.begun is None:
                raise
            return await broken_off(exchange, exchange.begun, error)
        finally:
            exchange.let_go()
            exchange.call = exchange.asked
            if exchange.begun:
                exchange.begun.close()
            if not is_answered:
                self._trials.unanswered(exchange.call)

    async def _answer(self, exchange: Exchange) -> web.StreamResponse:
        can_be_remote = exchange.call.can_be_remote
        is_prefill_placed = not can_be_remote
        deaths = 0
        deadline_s = self._now_s() + self._worker_wait_s
        while True:
            async with self._trials.trial(exchange.asked) as exchange.trial:
                with exchange.step("queue"):
                    booking = await self._router.book(exchange.call, deadline_s)
                exchange.booked(booking, booking.blocks)
                is_needed = bool(booking.instance.card.get("needs_hand_off"))
                try:
                    exchange.api = self._api_of(booking.instance)
                    check_fields(exchange.call, exchange.api)
                    if not is_prefill_placed:
                        exchange.hand_off = await self._handed_off(exchange, booking, is_needed)
                        is_prefill_placed = True
                        deadline_s = self._now_s() + self._worker_wait_s
                    elif exchange.hand_off and not self._prefill.can_reach(booking.instance):
                        exchange.let_go()
                    if is_needed and not can_be_remote:
                        raise bad_request(_ONLY_REMOTE, code="needs_local_prefill")
                    if is_needed and exchange.hand_off is None:
                        raise no_worker(
                            "No prefill worker has taken the prompt, and no decode worker can. Try again."
                        )
                    return await self._tried(exchange, booking, is_first=deaths == 0)
                except WorkerRefused as reason:
                    log.debug("%s refused a request: %s", booking.instance.worker, reason)
                    self._router.avoid(booking.instance)
                except WorkerDied as reason:
                    log.info("%s failed over a request: %s", booking.instance.worker, reason)
                    self._router.avoid(booking.instance)
                    exchange.worker_died(reason)
                    exchange.let_go()  # the dead worker may have taken the hand-off, which works only once
                    is_prefill_placed = not (is_needed and can_be_remote)
                    deaths += not (reason.is_asleep or exchange.begun)
                    deadline_s = self._now_s() + self._worker_wait_s
                    if deaths == MOST_DEATHS:
                        raise worker_failed(f"{deaths} workers died over this request: {reason}") from None
                finally:
                    booking.close()

    async def _handed_off(self, exchange: Exchange, booking: Booking, is_needed: bool) -> HandOff | None:
        """Have the prompt computed remotely if that is better, or ``is_needed``."""
        with exchange.step("prefill"):
            hand_off = await self._prefill.hand_off(
                exchange.call,
                booking.prefix_hit_rate,
                is_needed=is_needed,
                taker=booking.instance,
                blocks=booking.blocks,
                trace={**exchange.trace_headers(), REQUEST_ID: attempt_id(name_of(exchange.request))},
            )
            if exchange.trace:
                exchange.trace.note({"dynaplan.prefill": "remote" if hand_off else "local"})
            return hand_off

    async def _tried(self, exchange: Exchange, booking: Booking, is_first: bool) -> web.StreamResponse:
        """Make an attempt, and note what an answer teaches. A booking grows with the answer, seen or not."""
        if exchange.call.is_stream:
            response = await self._attempt(exchange, booking, is_first)
        else:
            with self._whole.waiting(booking, is_prefilled=exchange.hand_off is not None) as waited_for:
                response = await self._attempt(exchange, booking, is_first)
                waited_for.output_tokens = exchange.stated().output_tokens or 0
        if not exchange.failure:
            if exchange.trial:
                exchange.trial.answered()
            self._served(*exchange.reused(booking.instance.instance_id))
        return response

    async def _attempt(self, exchange: Exchange, booking: Booking, is_first: bool) -> web.StreamResponse:
        with exchange.step("decode", booking.instance.worker):
            return await self._sent(exchange, booking, is_first)

    async def _sent(self, exchange: Exchange, booking: Booking, is_first: bool) -> web.StreamResponse:
        request_id = attempt_id(name_of(exchange.request))
        exchange.worker = booking.instance.worker
        if exchange.trial:
            exchange.trial.at(booking.instance)
        if self._router.is_asleep(booking.instance):
            raise WorkerDied("its engine sleeps", is_asleep=True)  # since it was booked
        fields = exchange.hand_off.fields if exchange.hand_off else None
        exchange.prefilled = exchange.hand_off

        def may_fail() -> bool:
            return is_first and self._has_another_way(booking.instance, has_hand_off=fields is not None)

        if not (booking.instance.card.get("reserves") and exchange.call.endpoint.streams):
            return await self._exchanged(exchange, booking, fields or {}, request_id, may_fail)
        async with self._reservations.reserved(booking.instance, request_id, fields) as reserved:
            exchange.let_go()  # the worker has taken it over, or never will
            return await self._exchanged(exchange, booking, reserved, request_id, may_fail)

    async def _exchanged(
        self,
        exchange: Exchange,
        booking: Booking,
        fields: Mapping[str, Any],
        request_id: str,
        may_fail: Callable[[], bool],
    ) -> web.StreamResponse:
        call, instance, upstream = exchange.call, booking.instance, None
        patience = asyncio.timeout(None)
        try:
            async with patience:
                exchange.waiting(patience)
                upstream = await self._upstream.post(
                    instance.openai_url + call.endpoint.path,
                    call.body_with(fields),
                    request_id,
                    is_kept=instance.card.get("keep_alive", True),
                    trace=exchange.trace_headers(),
                )
                if upstream.status == 500:
                    await self._judge_500(exchange, upstream, may_fail)
                if upstream.status != 200 or not call.is_stream:
                    if exchange.begun:
                        raise worker_failed(await _refusal(instance, upstream))
                    return await whole(exchange, upstream)
                lines = WholeLines(upstream)
                first = await beginning(lines, exchange.api, call.endpoint)
            booking.prefilled()
            return await streamed(exchange, lines, first)
        except TimeoutError:
            if not patience.expired():
                raise
            raise WorkerDied("its engine fell asleep", is_asleep=True) from None
        finally:
            exchange.waiting(None)
            if upstream:
                upstream.close()  # gives a connection back whose answer was read to its end

    async def _judge_500(
        self, exchange: Exchange, upstream: aiohttp.ClientResponse, may_fail: Callable[[], bool]
    ) -> None:
        """Raise WorkerDied when the engine is dead behind its server, or another attempt may end better."""
        if exchange.api.death_marks:
            message = (await read_whole(upstream)).decode(errors="replace")
            if exchange.api.reports_death(message):
                raise WorkerDied("its engine is dead", is_connection_lost=True)
        if exchange.call.has_media and _NO_MEDIA in (await read_whole(upstream)):
            raise bad_request("The model here takes no such images, sounds or videos.", code="no_media")
        if may_fail():
            raise WorkerDied("status 500")  # as engines answer while they shut down
        instance = exchange.trial.instance if exchange.trial else None
        if not instance or instance.instance_id not in {each.instance_id for each in self._router.instances}:
            raise WorkerDied("status 500 of a worker that leaves")

    def _api_of(self, instance: Instance) -> EngineApi:
        name = instance.card.get("engine")
        if not isinstance(name, str):
            return NO_BOUNDS
        if name not in self._apis:
            try:
                self._apis[name] = self._engine_api(name)
            except OSError as error:  # it imports a module
                if is_exhausted(error):
                    raise out_of_descriptors(descriptor_limit()) from None
                raise
        return self._apis[name]

    def _has_another_way(self, instance: Instance, *, has_hand_off: bool) -> bool:
        """Tell whether a second attempt could end better: at another worker, or without the hand-off."""
        others = (each for each in self._router.instances if each.instance_id != instance.instance_id)
        return has_hand_off or any(others)


async def _refusal(instance: Instance, upstream: aiohttp.ClientResponse) -> str:
    """Say that a worker did not go on with an answer that another one had begun."""
    message = (await read_whole(upstream)).decode(errors="replace")
    return f"{instance.worker} did not go on with the answer ({upstream.status}): {message[:200]}"
