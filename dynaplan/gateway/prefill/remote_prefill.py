"""The frontend's side of a remote prefill: place a prompt, put it on the queue, wait for the hand-off.

A failure here costs time but never a request: without a hand-off the decode worker computes the prompt
itself. Prefill workers hold the KV entries of a hand-off until it is released.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from dynaplan.config.settings.frontend import FrontendSettings
from dynaplan.contract.store_keys import live_settings_prefix
from dynaplan.events.dispatch_order import UsualTime, deadline_s
from dynaplan.events.port import Messenger, WorkQueue
from dynaplan.events.prefill_requests import PrefillAnswer, RemotePrefillRequest, prefill_stream
from dynaplan.gateway import timing
from dynaplan.gateway.kv_routing.router_inputs import ReportedBlocks
from dynaplan.gateway.openai_api import NO_BLOCKS, ApiError, Call, PromptBlocks, worker_failed
from dynaplan.gateway.prefill.prefill_queue import PrefillDepth, PrefillRouter, RoutedPrompt
from dynaplan.gateway.routing.sleeping_workers import SleepingWorkers
from dynaplan.http.trace import NO_TRACE
from dynaplan.routing.disaggregation import PrefillPlace, place_prefill, with_live_settings
from dynaplan.store.discovery import Discovery
from dynaplan.store.instances import PREFILL_WORKER_QUEUE, Instance
from dynaplan.util.errors import DynaplanError, TemporaryError
from dynaplan.util.tasks import BackgroundTasks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HandOff:
    """A prompt that a prefill worker has computed, and whose KV entries it holds.

    ``fields`` identify them; they are merged into the top level of the decode request's body. ``release`` has
    the prefill worker free them; further calls do nothing. ``cached_tokens`` is the number of the prompt's
    tokens that the prefill worker had cached, None if it does not report it. ``on_first_token`` is to be
    called when the first token of a stream has come.
    """

    fields: Mapping[str, Any]
    release: Callable[[], None]
    cached_tokens: int | None = None
    on_first_token: Callable[[], None] = lambda: None


class HandOffs:
    """Tells prefill workers, in the background, which of their hand-offs they may free."""

    def __init__(self, connect: Callable[[], Awaitable[Messenger]], background: BackgroundTasks) -> None:
        self._connect = connect
        self._background = background
        self._held: dict[str, str] = {}

    def hold(self, answer: PrefillAnswer) -> None:
        """Remember the prefill worker of an answer that a request waits for, until ``release``."""
        if answer.release_to and not answer.error:
            self._held[answer.request_id] = answer.release_to

    def make(self, answer: PrefillAnswer, on_first_token: Callable[[], None] = lambda: None) -> HandOff:
        """Return the hand-off that an answer brings; ``on_first_token`` is called as ``HandOff`` says."""
        release = partial(self.release, answer.request_id)
        return HandOff(answer.hand_off, release, answer.cached_tokens, on_first_token)

    def release(self, request_id: str) -> None:
        """Tell the prefill worker that this request's hand-off is not needed any more, if one is held."""
        release_to = self._held.pop(request_id, "")
        if release_to:
            self._background.spawn(self._notify_worker(release_to, request_id))

    def release_unused(self, answer: PrefillAnswer) -> None:
        """Release the hand-off of an answer that no request waits for: it is late, or a redelivery's.

        A second answer from the worker that gave the first names the same entries, which are in use: it is
        kept.
        """
        in_use = self._held.get(answer.request_id)
        if answer.release_to and not answer.error and answer.release_to != in_use:
            self._background.spawn(self._notify_worker(answer.release_to, answer.request_id))

    async def _notify_worker(self, release_to: str, request_id: str) -> None:
        try:
            messenger = await self._connect()
            await messenger.publish(release_to, request_id.encode())
        except DynaplanError as error:
            log.debug("the hand-off of %s stays until it expires: %s", request_id, error)


MAX_PAYLOAD_BYTES = 1024 * 1024 - 4096
"""The largest payload of a prefill: the default limit of a NATS server (1 MiB) less room for its headers."""


WORKER_QUEUE_SHARE = 0.25
"""Part of the wait for a remote prefill after which a prompt in a worker's own queue is queued for all.

Only if the worker has answered nothing meanwhile: long enough for nearly any prompt, and most of the wait is
left for the others.
"""

_BETTER_LOCAL = (PrefillPlace.SHORT, PrefillPlace.QUEUE_FULL)
"""Places that make a remote prefill slower than a local one, but not impossible."""


@dataclass
class _Pending:
    """A prefill that was put on the queue; ``answer`` becomes None when no answer is expected any more."""

    answer: asyncio.Future[PrefillAnswer | None]
    payload: bytes = b""
    routed: RoutedPrompt | None = None
    sequence: int = 0
    put_s: float = float("inf")
    check: asyncio.TimerHandle | None = None


class PrefillRuntime(Protocol):
    """The part of a frontend's process that remote prefill needs."""

    namespace: str
    discovery: Discovery

    async def messenger(self) -> Messenger:
        """Return the messaging server's client; raises QueueUnavailable while that does not answer."""
        ...


class PrefillCounter(Protocol):
    """Counts prefills by model and place: ``remote``, ``local`` or ``fallback``."""

    def count_prefill(self, model: str, place: str) -> None: ...


class RemotePrefill:
    """Decides where a prompt is computed, and has it computed remotely.

    Work without a waiting request (releasing hand-offs, withdrawing prefills) runs in ``background``. One of
    several models (``is_one_of_several``) has a queue of its own.
    """

    def __init__(
        self,
        runtime: PrefillRuntime,
        settings: FrontendSettings,
        metrics: PrefillCounter,
        background: BackgroundTasks,
        *,
        sleeping: SleepingWorkers | None = None,
        reported: ReportedBlocks | None = None,
        is_one_of_several: bool = False,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._wall_s = wall_s
        self._configured = self._settings = settings.disaggregation
        self.is_on = settings.disaggregation.is_on
        """True where prefill workers are wanted."""
        self._discovery = discovery = runtime.discovery
        self._namespace = namespace = runtime.namespace
        self._component = settings.prefill_component
        self._frontends = settings.frontends
        self._stream = prefill_stream(namespace, self._component if is_one_of_several else "")
        self._wait_s = settings.prefill_wait_s
        self._worker_patience_s = self._wait_s * WORKER_QUEUE_SHARE
        self._connect = connect = runtime.messenger
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._reply_to = f"{namespace}.prefill_answers.{uuid.uuid4().hex}"
        self._queue: WorkQueue | None = None
        self._pending: dict[str, _Pending] = {}
        self._background = background
        self._hand_offs = HandOffs(connect, background)
        self._depth = PrefillDepth(own=lambda: len(self._pending), found_empty=self._release_lost)
        self._prefill_router = PrefillRouter(self._stream, connect, reported)
        self._workers: dict[int, Instance] = {}
        self._first_token_delay = UsualTime()
        self._retry_queue_at_s = float("-inf")
        discovery.on_change(self._requeue_lost)
        discovery.on_change(self._release_if_alone)
        self._sleeping = sleeping
        if sleeping:
            sleeping.on_change(lambda fell_asleep: self._pending and self._wake_if_asleep())

    async def connect(self) -> None:
        """Open the queue, trying again for as long as the NATS server is away."""
        is_subscribed = False  # once: the messenger itself subscribes again after an outage
        level = logging.WARNING
        while self._queue is None:
            try:
                messenger = await self._connect()
                if not is_subscribed:
                    await messenger.subscribe(self._reply_to, self._receive)
                    is_subscribed = True
                self._queue = await messenger.queue(self._stream)
            except TemporaryError as error:
                log.log(level, "no remote prefill until the prefill queue answers: %s", error)
                level = logging.DEBUG
                await asyncio.sleep(error.delay_s)

    def configure(self, keys: Mapping[str, str]) -> None:
        """Take over the live settings from the keys under ``live_prefix``."""
        self._settings = with_live_settings(self._configured, self._namespace, keys)
        log.info("disaggregation: %s", self._settings)

    @property
    def is_connected(self) -> bool:
        return self._queue is not None

    @property
    def queue_size(self) -> int:
        return self._depth.estimate

    @property
    def live_prefix(self) -> str:
        """The prefix of the keys in the store that change the settings of a running deployment."""
        return live_settings_prefix(self._namespace)

    async def hand_off(
        self,
        call: Call,
        prefix_hit_rate: float,
        *,
        is_needed: bool = False,
        taker: Instance | None = None,
        blocks: PromptBlocks = NO_BLOCKS,
        trace: Callable[[], Mapping[str, str]] = lambda: NO_TRACE,
        running: int = 0,
    ) -> HandOff | None:
        """Return the hand-off of the remotely computed prompt; None when the decode worker shall compute it.

        ``is_needed`` says that the decode worker cannot compute prompts: then a short prompt or a full
        queue does not prevent a remote prefill. The caller must release the hand-off. Raises ApiError when
        a prefill worker answers that this prompt can never be computed. ``taker`` is the decode worker that
        is to take it over, which has ``running`` requests of this frontend; by ``blocks`` the prefill worker
        is found that has most of the prompt cached; ``trace`` returns the headers of the client's trace.
        Where all prefill workers sleep one is woken, and a prompt that can is computed locally meanwhile.
        """
        place = self._place(call, prefix_hit_rate, taker, running)
        is_remote = place is PrefillPlace.REMOTE or (is_needed and place in _BETTER_LOCAL)
        if is_remote and self._wake_if_asleep() and not is_needed:
            place, is_remote = PrefillPlace.ASLEEP, False
        if not is_remote:
            if place is not PrefillPlace.OFF:
                log.debug("local prefill of %d tokens: %s", call.prompt_tokens, place.value)
            self._metrics.count_prefill(call.model, "local")
            return None
        answer = await self._compute(call, blocks, trace(), is_needed=is_needed)
        if answer is None or (answer.error and answer.is_retryable):
            log.debug(
                "local prefill of %d tokens: %s", call.prompt_tokens, answer.error if answer else "no answer"
            )
            self._metrics.count_prefill(call.model, "fallback")
            return None
        if answer.status:
            raise ApiError(answer.status, f"The prompt cannot be computed: {answer.error}")
        if answer.error:
            raise worker_failed(f"The prompt cannot be computed: {answer.error}")
        log.debug("remote prefill of %d tokens by %s", call.prompt_tokens, answer.worker)
        self._metrics.count_prefill(call.model, "remote")
        on_first_token = partial(self._observe_first_token, self._loop.time())
        return self._hand_offs.make(answer, on_first_token)

    def _observe_first_token(self, handed_over_s: float) -> None:
        """Note the first token of a prompt that was handed over at this time of the loop."""
        self._first_token_delay = self._first_token_delay.after(self._loop.time() - handed_over_s)

    async def close(self) -> None:
        """Let the requests that still wait be computed locally, and stop reading the queue's depth."""
        self._release_all()
        await self._depth.close()

    def can_reach(self, taker: Instance) -> bool:
        """Return whether every prefill worker can hand KV entries over to that decode worker."""
        return all(each.can_hand_over_to(taker) for each in self._discovery.instances(self._component))

    def _place(
        self, call: Call, prefix_hit_rate: float, taker: Instance | None, running: int
    ) -> PrefillPlace:
        if not self._settings.is_on:
            return PrefillPlace.OFF
        if self._queue is None or self._loop.time() < self._retry_queue_at_s:
            return PrefillPlace.QUEUE_AWAY
        self._depth.keep(self._queue)
        return place_prefill(
            self._settings,
            call.prompt_tokens,
            prefix_hit_rate,
            self.queue_size,
            len(self._discovery.instances(self._component)),
            taker is None or self.can_reach(taker),
            running * self._frontends,
        )

    async def _compute(
        self, call: Call, blocks: PromptBlocks, trace: Mapping[str, str], *, is_needed: bool
    ) -> PrefillAnswer | None:
        """Put the prompt on the queue; return the prefill worker's answer, None when none arrives in time.

        What is too large for the queue is answered here.
        """
        request_id = uuid.uuid4().hex
        request = self._with_deadline(
            RemotePrefillRequest(
                request_id,
                path=call.endpoint.path,
                body=call.document,
                reply_to=self._reply_to,
                trace=trace,
            )
        )
        payload = request.to_json() if call.is_whole else request.to_json_around(call.body)
        if len(payload) > MAX_PAYLOAD_BYTES:
            error = (
                f"it has {len(payload)} bytes, and the prefill queue takes {MAX_PAYLOAD_BYTES}; "
                "shorten the prompt"
            )
            return PrefillAnswer(request_id, error=error, is_retryable=not is_needed, status=413)
        pending = self._pending[request_id] = _Pending(self._loop.create_future(), payload)
        timer = self._loop.call_later(self._wait_s, _give_up, pending.answer)
        try:
            pending.routed = await self._prefill_router.route(blocks, self._awake())
            if pending.routed:
                self._check_later(pending)
            if not await self._enqueue(pending):
                return None
            return await pending.answer
        except asyncio.CancelledError:
            self._hand_offs.release(request_id)
            raise
        finally:
            timer.cancel()
            if pending.check:
                pending.check.cancel()
            _give_up(pending.answer)
            del self._pending[request_id]
            if pending.routed:
                self._prefill_router.close(pending.routed)
            self._withdraw_unless_answered(pending)

    def _with_deadline(self, request: RemotePrefillRequest) -> RemotePrefillRequest:
        """Return the request with arrival and deadline; unchanged for dispatch in the order of arrival."""
        settings = self._settings
        if not settings.prefill_deadline_ms:
            return request
        now_s = self._wall_s()
        until_s = deadline_s(now_s, settings.prefill_deadline_ms, self._first_token_delay)
        return replace(
            request,
            arrived_unix_s=now_s,
            deadline_unix_s=until_s,
            owed_unix_s=until_s + settings.prefill_late_wait_s,
            waits_until_unix_s=now_s + self._wait_s,
        )

    async def _enqueue(self, pending: _Pending) -> bool:
        queue = pending.routed.queue if pending.routed else self._queue
        assert queue is not None
        try:
            async with asyncio.timeout(timing.PREFILL_QUEUE_TIMEOUT_S):
                pending.sequence = await queue.put(pending.payload)
                pending.put_s = self._loop.time()
        except (DynaplanError, TimeoutError) as error:
            log.debug("the prefill queue did not take a request: %s", error)
            self._retry_queue_at_s = self._loop.time() + timing.PREFILL_QUEUE_TIMEOUT_S
            return False
        return True

    def _withdraw_unless_answered(self, pending: _Pending) -> None:
        """Remove an unanswered prefill from the queue when its request does not wait for it any more."""
        is_answered = pending.answer.done() and not pending.answer.cancelled() and pending.answer.result()
        if pending.sequence and not is_answered:
            self._background.spawn(self._withdraw(pending.sequence))

    async def _withdraw(self, sequence: int) -> None:
        assert self._queue is not None
        try:
            await self._queue.remove(sequence)
        except DynaplanError as error:
            log.debug("prefill %d stays in the queue: %s", sequence, error)

    def _receive(self, subject: str, payload: bytes) -> None:
        """Give an answer to its request; refuse it when none waits (a redelivery's answer, or a late one)."""
        try:
            answer = PrefillAnswer.from_json(payload)
        except ValueError as error:
            log.warning("ignoring a message on %s: it is no prefill answer (%s)", subject, error)
            return
        if self._instance_of(answer.worker):
            self._prefill_router.record_answer(answer.worker)
        pending = self._pending.get(answer.request_id)
        if pending and not pending.answer.done():
            self._hand_offs.hold(answer)
            pending.answer.set_result(answer)
        else:
            self._hand_offs.release_unused(answer)

    def _wake_if_asleep(self) -> bool:
        """Have a prefill worker woken if all of them sleep; return whether they do."""
        instances = self._discovery.instances(self._component)
        if self._sleeping is None or not self._sleeping.all_asleep(instances):
            return False
        if reason := self._sleeping.wake_one(instances):
            log.debug("every prefill worker sleeps: %s", reason)
        return True

    def _instance_of(self, worker: str) -> int:
        instances = self._discovery.instances(self._component)
        return next((each.instance_id for each in instances if each.worker == worker), 0)

    def _awake(self) -> list[Instance]:
        instances = self._discovery.instances(self._component)
        return [each for each in instances if not (self._sleeping and each in self._sleeping)]

    def _requeue_lost(self) -> None:
        """Put the prompts that wait for a worker that has left on the shared queue."""
        present = {each.instance_id: each for each in self._discovery.instances(self._component)}
        gone = [each for number, each in self._workers.items() if number not in present]
        self._workers = present
        for pending in self._pending.values():
            if pending.routed and pending.routed.instance.instance_id not in present:
                self._background.spawn(self._requeue(pending, "has left"))
        for each in gone:
            if each.card.get(PREFILL_WORKER_QUEUE):
                self._background.spawn(self._prefill_router.clear(each, self._worker_queues))

    def _check_later(self, pending: _Pending) -> None:
        pending.check = self._loop.call_later(self._worker_patience_s, self._check_worker_queue, pending)

    def _check_worker_queue(self, pending: _Pending) -> None:
        """Put a prompt on the shared queue if its worker has answered nothing for a while."""
        if pending.routed is None or pending.answer.done():
            return
        others = (each for each in self._awake() if each.worker != pending.routed.instance.worker)
        if any(others) and self._prefill_router.is_silent(pending.routed, self._worker_patience_s):
            self._background.spawn(self._requeue(pending, "has answered nothing"))
        else:
            self._check_later(pending)

    def _worker_queues(self) -> dict[str, Instance]:
        instances = self._discovery.instances(self._component)
        return {str(each.card.get(PREFILL_WORKER_QUEUE)): each for each in instances}

    async def _requeue(self, pending: _Pending, why: str) -> None:
        routed, pending.routed = pending.routed, None
        if routed is None or pending.answer.done():
            return
        self._prefill_router.close(routed)
        log.info("%s %s: its prompt is queued for the others", routed.instance.worker, why)
        if pending.sequence:
            await self._withdraw(pending.sequence)
        if pending.answer.done():
            return
        if not await self._enqueue(pending):
            _give_up(pending.answer)
        elif pending.answer.done():  # meanwhile: by an answer, or as the client has left
            await self._withdraw(pending.sequence)

    def _release_if_alone(self) -> None:
        if self._pending and not self._discovery.instances(self._component):
            self._release_all()

    def _release_all(self) -> None:
        for pending in self._pending.values():
            _give_up(pending.answer)

    def _release_lost(self, empty_s: float) -> None:
        """Give up the prefills that were queued before ``empty_s``, when the queue was seen empty.

        They have left the queue without an answer having arrived: it was lost on its way.
        """
        for pending in self._pending.values():
            if pending.put_s < empty_s - timing.PREFILL_ANSWER_S:
                _give_up(pending.answer)


def _give_up(answer: asyncio.Future[PrefillAnswer | None]) -> None:
    if not answer.done():
        answer.set_result(None)
