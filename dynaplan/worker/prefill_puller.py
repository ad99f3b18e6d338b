"""The prefill worker's loop: take work from the queue, compute it, hand it over, acknowledge."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from dynaplan.config.settings.worker import WorkerSettings
from dynaplan.engines.port import RemotePrefillEngine
from dynaplan.events.dispatched_queue import LATE_LANE, DispatchedQueue
from dynaplan.events.port import Messenger, WorkItem, WorkQueue
from dynaplan.events.prefill_requests import PrefillAnswer, RemotePrefillRequest, prefill_stream
from dynaplan.util.backoff import Backoff
from dynaplan.util.clock import Clock
from dynaplan.util.errors import PermanentError, QueueUnavailable, RequestRefused
from dynaplan.util.tasks import BackgroundTasks
from dynaplan.worker.timing import (
    PREFILL_ANSWER_TIMEOUT_S,
    PREFILL_ASLEEP_POLL_S,
    PREFILL_GET_S,
    PREFILL_PROGRESS_S,
    PREFILL_RETRY_MAX_S,
    PREFILL_RETRY_MIN_S,
)

log = logging.getLogger(__name__)

MAX_DELIVERIES = 4
"""A request delivered more often than that has killed its workers: it is given up."""


T = TypeVar("T")


class PrefillPuller:
    """Pulls requests from a prefill queue, and has the engine compute them, through outages of the queue.

    It is the namespace's queue, or, where there are several models, that of the model's ``component``.

    A request is answered as soon as the engine hands it over, or has failed to, and acknowledged when its
    prefill has ended too, so that the request of a dying worker is delivered again. A request that cannot be
    read is acknowledged at once: another delivery would not help. An engine that ``waits_for_release`` is
    informed when its hand-offs are taken. While the engine ``is_asleep`` nothing is taken from the queue.

    With a ``lane`` (its name as a taker) it also takes the prompts that are directed to it there: up to
    ``max_concurrent`` at once, whatever it holds of the shared queue. While it holds so many of them it takes
    nothing from the shared queue. Where prompts of the shared queue have deadlines, it takes them by these
    (``events/dispatched_queue.py``).
    """

    def __init__(
        self,
        messenger: Callable[[], Awaitable[Messenger]],
        engine: RemotePrefillEngine,
        clock: Clock,
        namespace: str,
        worker_name: str,
        max_concurrent: int = WorkerSettings.max_concurrent_prefills,
        is_asleep: Callable[[], bool] = lambda: False,
        lane: str = "",
        component: str = "",
    ) -> None:
        self._messenger = messenger
        self._engine = engine
        self._clock = clock
        self._stream = prefill_stream(namespace, component)
        self._worker_name = worker_name
        self._release_to = release_subject(namespace, worker_name) if engine.waits_for_release else ""
        self._is_subscribed = False
        self._slots = asyncio.Semaphore(max_concurrent)
        self._lane = lane
        self._lane_slots = asyncio.Semaphore(max_concurrent)
        self._max_concurrent = max_concurrent
        self._directed = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_asleep = is_asleep
        self._working = BackgroundTasks()
        self._in_hand: set[str] = set()
        self._note_computed: Callable[[float], None] = lambda took_s: None
        self._is_stopping = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def held(self) -> int:
        """The number of requests that were taken and are not acknowledged yet."""
        return len(self._working)

    async def run(self) -> None:
        """Pull requests and carry them out until ``finish`` is called; an outage is waited out."""
        backoff = Backoff(PREFILL_RETRY_MIN_S, PREFILL_RETRY_MAX_S, self._clock.sleep)
        self._is_idle.clear()
        while not self._is_stopping:
            try:
                messenger = await self._messenger()
                await self._subscribe_to_releases(messenger)
                queue = await messenger.queue(self._stream)
                backoff.reset()
                await self._pull_all(queue, messenger)
            except QueueUnavailable as error:
                if backoff.is_first:
                    log.warning("the prefill queue does not answer, retrying: %s", error)
                await backoff.pause()
        self._is_idle.set()

    async def finish(self) -> None:
        """Take nothing more; return when everything taken is acknowledged.

        Work that the queue hands over while the last question is still open is done too: giving it back
        would only delay it.
        """
        self._is_stopping = True
        await self._is_idle.wait()
        await self._working.finish()

    async def _subscribe_to_releases(self, messenger: Messenger) -> None:
        """Subscribe to releases; once, because the messenger itself subscribes again after an outage."""
        if self._is_subscribed or not self._release_to:
            return
        await messenger.subscribe(
            self._release_to, lambda _, payload: self._engine.release(payload.decode("utf-8", "replace"))
        )
        self._is_subscribed = True

    async def _pull_all(self, shared: WorkQueue, messenger: Messenger) -> None:
        """Pull from the shared queue, and from the lane if there is one, until one of them is away."""

        async def open_late() -> WorkQueue:
            return await messenger.queue(self._stream, LATE_LANE)

        dispatched = DispatchedQueue(shared, open_late, self._clock, time.time)
        self._note_computed = dispatched.computed
        pulls = [asyncio.ensure_future(self._pull(dispatched, self._slots, messenger))]
        if self._lane:
            lane = await messenger.queue(self._stream, self._lane)
            pulls.append(asyncio.ensure_future(self._pull(lane, self._lane_slots, messenger)))
        try:
            await asyncio.gather(*pulls)
        finally:
            for each in pulls:
                each.cancel()
            await asyncio.gather(*pulls, return_exceptions=True)
            await dispatched.close()

    async def _pull(
        self, queue: WorkQueue | DispatchedQueue, slots: asyncio.Semaphore, messenger: Messenger
    ) -> None:
        while not self._is_stopping:
            if self._is_asleep():
                await self._clock.sleep(PREFILL_ASLEEP_POLL_S)
                continue
            if slots is self._slots:
                await self._has_room.wait()
            await slots.acquire()
            item = None
            try:
                item = await queue.get(PREFILL_GET_S) if not self._is_stopping else None
            finally:
                if item is None:
                    slots.release()
            if item:
                work = self._process_in_slot(item, slots, messenger)
                self._working.spawn(work, "the work on a prefill request")

    async def _process_in_slot(self, item: WorkItem, slots: asyncio.Semaphore, messenger: Messenger) -> None:
        self._count_directed(slots, 1)
        try:
            await self._process(item, messenger)
        finally:
            self._count_directed(slots, -1)
            slots.release()

    def _count_directed(self, slots: asyncio.Semaphore, change: int) -> None:
        """Count a prompt of the own lane in (1) or out (-1); at the limit the shared queue waits."""
        if slots is self._lane_slots:
            self._directed += change
            if self._directed < self._max_concurrent:
                self._has_room.set()
            else:
                self._has_room.clear()

    async def _process(self, item: WorkItem, messenger: Messenger) -> None:
        reporting = asyncio.create_task(self._report_progress(item))
        try:
            request = _parse(item)
            if request and request.request_id in self._in_hand:
                return  # delivered again after an outage: the first delivery's work acknowledges both
            if request:
                await self._serve(request, item, messenger)
        finally:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)
        await self._retry_while_away(item.ack)

    async def _serve(self, request: RemotePrefillRequest, item: WorkItem, messenger: Messenger) -> None:
        started_s = self._clock.now_s()

        async def send(answer: PrefillAnswer) -> None:
            payload = answer.to_json()
            if not answer.error:
                self._note_computed(self._clock.now_s() - started_s)
            if request.reply_to:
                await self._retry_while_away(lambda: messenger.publish(request.reply_to, payload))

        reply = _Reply(request.request_id, self._worker_name, self._release_to, send)
        self._in_hand.add(request.request_id)
        try:
            if item.deliveries > MAX_DELIVERIES:
                log.error("prefill %s given up: delivered %d times", request.request_id, item.deliveries)
                await reply.refuse(f"given up after {item.deliveries} deliveries", is_retryable=False)
            else:
                await self._prefill(request, reply)
        finally:
            self._in_hand.discard(request.request_id)

    async def _prefill(self, request: RemotePrefillRequest, reply: _Reply) -> None:
        """Let the engine work; answer a failure, unless the decode side has its hand-off already."""
        error, is_retryable, status = "the engine handed nothing over", True, 0
        try:
            await self._engine.prefill(request, reply.hand_off_ready)
        except RequestRefused as refusal:
            log.info("prefill %s is refused: %s", request.request_id, refusal)
            error, is_retryable, status = str(refusal), False, refusal.status
        except Exception as failure:
            log.exception("prefill %s failed", request.request_id)
            error = f"{type(failure).__name__}: {failure}"
            is_retryable = not isinstance(failure, PermanentError)
        if not reply.is_sent:
            await reply.refuse(error, is_retryable=is_retryable, status=status)

    async def _report_progress(self, item: WorkItem) -> None:
        """Report to the queue every second that the work goes on."""
        while True:
            await self._clock.sleep(PREFILL_PROGRESS_S)
            try:
                await item.in_progress()
            except QueueUnavailable:
                log.debug("the queue does not answer; the work continues")

    async def _retry_while_away(self, call: Callable[[], Awaitable[None]]) -> None:
        """Repeat the call while the queue is away, for 10 s; then the request will be delivered again."""
        give_up_s = self._clock.now_s() + PREFILL_ANSWER_TIMEOUT_S
        while True:
            try:
                return await call()
            except QueueUnavailable as error:
                if self._clock.now_s() >= give_up_s:
                    log.warning("the prefill queue stayed away: %s", error)
                    return None
                await self._clock.sleep(PREFILL_RETRY_MIN_S)


class _Reply:
    """The single answer to a request."""

    def __init__(
        self, request_id: str, worker: str, release_to: str, send: Callable[[PrefillAnswer], Awaitable[None]]
    ) -> None:
        self._request_id = request_id
        self._worker = worker
        self._release_to = release_to
        self._send = send
        self.is_sent = False

    async def hand_off_ready(self, hand_off: Mapping[str, Any], cached_tokens: int | None = None, /) -> None:
        """Answer that a decode worker may begin, with the hand-off."""
        if self.is_sent:
            raise RuntimeError(f"prefill {self._request_id} was handed over already")
        await self._send(
            PrefillAnswer(
                self._request_id,
                self._worker,
                hand_off,
                release_to=self._release_to,
                cached_tokens=cached_tokens,
            )
        )
        self.is_sent = True

    async def refuse(self, error: str, *, is_retryable: bool, status: int = 0) -> None:
        """Answer that there is no hand-off."""
        await self._send(
            PrefillAnswer(
                self._request_id, self._worker, error=error, is_retryable=is_retryable, status=status
            )
        )
        self.is_sent = True


def release_subject(namespace: str, worker_name: str) -> str:
    """The subject on which the decode side names the hand-offs of this worker that it has taken."""
    return re.sub(r"[\s/\\*>]", "_", f"{namespace}.kv_hand_offs.{worker_name}")


def _parse(item: WorkItem) -> RemotePrefillRequest | None:
    try:
        return RemotePrefillRequest.from_json(item.payload)
    except ValueError as error:
        log.error("dropping what is no prefill request: %s", error)
        return None
