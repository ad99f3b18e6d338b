"""The prefill worker's loop: take work from the queue, compute it, answer, acknowledge."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dynaplan.domain.errors import PermanentError, QueueUnavailable
from dynaplan.domain.prefill import PrefillAnswer, RemotePrefillRequest, prefill_stream
from dynaplan.ports import Clock, Engine, Messenger, WorkItem, WorkQueue

log = logging.getLogger(__name__)

CONCURRENT_PREFILLS = 4
"""How many requests a prefill worker holds at once, unless ``max-concurrent-prefills`` says otherwise.

Prefill is bound by computation, so batching short prompts is all there is to gain: four keep the engine
from idling between two. What one worker takes, one that was just added can no longer relieve it of.
"""

MOST_DELIVERIES = 4
"""A request delivered more often than that has killed its workers: it is given up."""

GET_S = 1.0
IN_PROGRESS_EVERY_S = 1.0
RETRY_FIRST_S = 0.1
RETRY_LONGEST_S = 2.0
ANSWER_WITHIN_S = 10.0
"""How long an answer is tried to be sent while the queue is away; later nobody waits for it."""

T = TypeVar("T")


class PrefillPuller:
    """Pulls from the namespace's prefill queue for as long as it runs, whatever becomes of the queue.

    A request is acknowledged after its answer was sent, so that one whose worker dies is delivered
    again. One that cannot be read is acknowledged at once: delivered again it would not get better.
    """

    def __init__(
        self,
        messenger: Callable[[], Awaitable[Messenger]],
        engine: Engine,
        clock: Clock,
        namespace: str,
        worker_name: str,
        most_at_once: int = CONCURRENT_PREFILLS,
    ) -> None:
        self._messenger = messenger
        self._engine = engine
        self._clock = clock
        self._stream = prefill_stream(namespace)
        self._worker_name = worker_name
        self._slots = asyncio.Semaphore(most_at_once)
        self._working: set[asyncio.Task[None]] = set()
        self._in_hand: set[str] = set()
        self._is_stopping = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def held(self) -> int:
        """How many requests were taken and are not acknowledged yet."""
        return len(self._working)

    async def run(self) -> None:
        """Pull until ``finish`` is called."""
        delay_s = RETRY_FIRST_S
        self._is_idle.clear()
        while not self._is_stopping:
            try:
                messenger = await self._messenger()
                queue = await messenger.queue(self._stream)
                delay_s = RETRY_FIRST_S
                await self._pull(queue, messenger)
            except QueueUnavailable as error:
                if delay_s == RETRY_FIRST_S:
                    log.warning("the prefill queue does not answer, trying on: %s", error)
                await self._clock.sleep(delay_s)
                delay_s = min(2 * delay_s, RETRY_LONGEST_S)
        self._is_idle.set()

    async def finish(self) -> None:
        """Take nothing more; return when everything taken is acknowledged.

        What the queue hands over while the last question is still open is done too: giving it back
        could only delay it.
        """
        self._is_stopping = True
        await self._is_idle.wait()
        while self._working:
            await asyncio.wait(set(self._working))

    async def _pull(self, queue: WorkQueue, messenger: Messenger) -> None:
        while not self._is_stopping:
            await self._slots.acquire()
            item = None
            try:
                item = await queue.get(GET_S) if not self._is_stopping else None
            finally:
                if item is None:
                    self._slots.release()
            if item:
                self._start(item, messenger)

    def _start(self, item: WorkItem, messenger: Messenger) -> None:
        task = asyncio.create_task(self._work(item, messenger))
        self._working.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._working.discard(task)
        self._slots.release()
        if not task.cancelled() and task.exception():
            log.error("a prefill request was left unacknowledged", exc_info=task.exception())

    async def _work(self, item: WorkItem, messenger: Messenger) -> None:
        keeping = asyncio.create_task(self._keep(item))
        try:
            request = _read(item)
            if request and request.request_id in self._in_hand:
                return  # delivered again after an outage: the first delivery's work acknowledges both
            if request:
                await self._serve(request, item, messenger)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        await self._persist(item.ack)

    async def _serve(self, request: RemotePrefillRequest, item: WorkItem, messenger: Messenger) -> None:
        self._in_hand.add(request.request_id)
        try:
            payload = (await self._answer(request, item)).to_json()
            if request.reply_to:
                await self._persist(lambda: messenger.publish(request.reply_to, payload))
        finally:
            self._in_hand.discard(request.request_id)

    async def _answer(self, request: RemotePrefillRequest, item: WorkItem) -> PrefillAnswer:
        deliveries = item.deliveries
        if deliveries > MOST_DELIVERIES:
            log.error("prefill %s given up: delivered %d times", request.request_id, deliveries)
            error = f"given up after {deliveries} deliveries"
            return PrefillAnswer(request.request_id, self._worker_name, error=error, is_retryable=False)
        try:
            handoff = await self._engine.prefill(request)
        except Exception as error:
            log.exception("prefill %s failed", request.request_id)
            return PrefillAnswer(
                request.request_id,
                self._worker_name,
                error=f"{type(error).__name__}: {error}",
                is_retryable=not isinstance(error, PermanentError),
            )
        return PrefillAnswer(request.request_id, self._worker_name, handoff)

    async def _keep(self, item: WorkItem) -> None:
        """Tell the queue that the work goes on."""
        while True:
            await self._clock.sleep(IN_PROGRESS_EVERY_S)
            try:
                await item.in_progress()
            except QueueUnavailable:
                log.debug("the queue is away; work goes on")

    async def _persist(self, call: Callable[[], Awaitable[None]]) -> None:
        """Repeat the call while the queue is away; in the end leave it: the request is delivered again."""
        give_up_s = self._clock.now_s() + ANSWER_WITHIN_S
        while True:
            try:
                return await call()
            except QueueUnavailable as error:
                if self._clock.now_s() >= give_up_s:
                    log.warning("the prefill queue stayed away: %s", error)
                    return None
                await self._clock.sleep(RETRY_FIRST_S)


def _read(item: WorkItem) -> RemotePrefillRequest | None:
    try:
        return RemotePrefillRequest.from_json(item.payload)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.error("dropping what is no prefill request (%s: %s)", type(error).__name__, error)
        return None
