"""The frontend's side of the prefill queue: place a prompt, put it on the queue, wait for the answer.

A failure here costs time but never a request: without a hand-off the decode worker computes the prompt
itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from dynaplan.config.settings.routing import DisaggregationSettings
from dynaplan.events.dispatch_order import UsualTime, deadline_s
from dynaplan.events.messaging_port import Messenger, WorkQueue
from dynaplan.events.prefill_requests import PrefillAnswer, RemotePrefillRequest, prefill_stream
from dynaplan.fleet.store_keys import live_settings_prefix
from dynaplan.gateway.kv_routing.cached_prefixes import ToldBlocks
from dynaplan.gateway.openai_api import NO_BLOCKS, ApiError, Call, PromptBlocks, worker_failed
from dynaplan.gateway.prefill.depth import PrefillDepth
from dynaplan.gateway.prefill.directing import Direction, PrefillDirector
from dynaplan.gateway.prefill.disaggregation import PrefillPlace, place_prefill, with_live_settings
from dynaplan.gateway.prefill.hand_off import HandOff, HandOffs
from dynaplan.gateway.routing.sleeping_workers import Sleepers
from dynaplan.store.discovery import Discovery
from dynaplan.store.instances import PREFILL_LANE, Instance
from dynaplan.util.errors import DynaplanError, TemporaryError
from dynaplan.util.http_routes import NO_TRACE
from dynaplan.util.tasks import BackgroundTasks

log = logging.getLogger(__name__)

LARGEST_PAYLOAD_BYTES = 1024 * 1024 - 4096
"""The largest payload of a prefill: the default limit of a NATS server (1 MiB) less room for its headers."""

ANSWER_S = 1.0
"""Time an answer takes to arrive at most: a prefill that left the queue longer ago has lost its answer.

A prefill worker publishes the answer before the work leaves the queue.
"""

QUEUE_TIMEOUT_S = 1.0
"""Time for which a request waits for the queue to take its prefill.

After a failure no request tries the queue again for the same time.
"""

PART_IN_LANE = 0.25
"""Part of the wait for a remote prefill after which a directed prompt goes to the others, if its worker has
answered nothing meanwhile: long enough for nearly any prompt, and it leaves the others most of the wait."""

_BETTER_LOCAL = (PrefillPlace.SHORT, PrefillPlace.QUEUE_FULL)
"""Places that make a remote prefill slower than a local one, but not impossible."""


@dataclass
class _Pending:
    """A prefill that was put on the queue; ``answer`` becomes None when no answer will come any more."""

    answer: asyncio.Future[PrefillAnswer | None]
    payload: bytes = b""
    direction: Direction | None = None
    sequence: int = 0
    put_s: float = float("inf")
    look: asyncio.TimerHandle | None = None


class RemotePrefill:
    """Decides where a prompt is computed, and has it computed remotely.

    ``connect`` returns the process's messenger; it may fail, and is tried again. ``placed`` is called with
    the model and ``remote``, ``local`` or ``fallback`` for every request. Work without a waiting request
    (releasing hand-offs, withdrawing prefills) runs in ``background``.
    """

    def __init__(
        self,
        settings: DisaggregationSettings,
        discovery: Discovery,
        *,
        namespace: str,
        component: str,
        wait_s: float,
        connect: Callable[[], Awaitable[Messenger]],
        placed: Callable[[str, str], None],
        background: BackgroundTasks,
        sleepers: Sleepers | None = None,
        told: ToldBlocks | None = None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._wall_s = wall_s
        self._configured = self._settings = settings
        self._discovery = discovery
        self._namespace = namespace
        self._component = component
        self._wait_s = wait_s
        self._lane_patience_s = wait_s * PART_IN_LANE
        self._connect = connect
        self._placed = placed
        self._loop = asyncio.get_running_loop()
        self._reply_to = f"{namespace}.prefill_answers.{uuid.uuid4().hex}"
        self._queue: WorkQueue | None = None
        self._pending: dict[str, _Pending] = {}
        self._background = background
        self._hand_offs = HandOffs(connect, background)
        self._depth = PrefillDepth(own=lambda: len(self._pending), found_empty=self._release_lost)
        self._director = PrefillDirector(namespace, connect, told)
        self._workers: dict[int, Instance] = {}
        self._rest = UsualTime()
        self._left_alone_until_s = float("-inf")
        discovery.on_change(self._take_back)
        discovery.on_change(self._release_if_alone)
        self._sleepers = sleepers
        if sleepers:
            sleepers.on_change(lambda fell_asleep: self._pending and self._wake_if_asleep())

    async def connect(self) -> None:
        """Open the queue, trying again for as long as the NATS server is away."""
        while self._queue is None:
            try:
                messenger = await self._connect()
                await messenger.subscribe(self._reply_to, self._receive)
                self._queue = await messenger.queue(prefill_stream(self._namespace))
            except TemporaryError as error:
                log.debug("no prefill queue yet: %s", error)
                await asyncio.sleep(error.delay_s)

    def configure(self, keys: Mapping[str, str]) -> None:
        """Take over the live settings from the keys under ``live_prefix``."""
        self._settings = with_live_settings(self._configured, self._namespace, keys)
        log.info("disaggregation: %s", self._settings)

    @property
    def is_connected(self) -> bool:
        """True when the queue is open."""
        return self._queue is not None

    @property
    def queue_size(self) -> int:
        """The estimated number of prefills in the queue at this moment."""
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
        trace: Mapping[str, str] = NO_TRACE,
    ) -> HandOff | None:
        """Return the hand-off of the remotely computed prompt; None when the decode worker shall compute it.

        ``is_needed`` says that the decode worker cannot compute prompts: then a short prompt or a full
        queue does not prevent a remote prefill. The caller must release the hand-off. Raises ApiError when
        a prefill worker answers that this prompt can never be computed. ``taker`` is the decode worker that
        is to take it over; by ``blocks`` the prefill worker is found that has most of the prompt cached;
        ``trace`` are the headers of the client's trace.
        Where all prefill workers sleep one is woken, and a prompt that can is computed locally meanwhile.
        """
        place = self._place(call, prefix_hit_rate, taker)
        is_remote = place is PrefillPlace.REMOTE or (is_needed and place in _BETTER_LOCAL)
        if is_remote and self._wake_if_asleep() and not is_needed:
            place, is_remote = PrefillPlace.ASLEEP, False
        if not is_remote:
            log.debug("local prefill of %d tokens: %s", call.prompt_tokens, place.value)
            self._placed(call.model, "local")
            return None
        answer = await self._computed(call, blocks, trace)
        if answer is None or (answer.error and answer.is_retryable):
            log.debug(
                "local prefill of %d tokens: %s", call.prompt_tokens, answer.error if answer else "no answer"
            )
            self._placed(call.model, "fallback")
            return None
        if answer.status:
            raise ApiError(answer.status, f"The prompt cannot be computed: {answer.error}")
        if answer.error:
            raise worker_failed(f"The prompt cannot be computed: {answer.error}")
        log.debug("remote prefill of %d tokens by %s", call.prompt_tokens, answer.worker)
        self._placed(call.model, "remote")
        answering = partial(self._note_rest, self._loop.time())
        return self._hand_offs.of(answer, self._instance_of(answer.worker), answering)

    def _note_rest(self, handed_over_s: float) -> None:
        """Note that the first token has come, of a prompt that was handed over at this time of the loop."""
        self._rest = self._rest.after(self._loop.time() - handed_over_s)

    async def close(self) -> None:
        """Let the requests that still wait be computed locally, and stop reading the queue's depth."""
        self._release_all()
        await self._depth.close()

    def can_reach(self, taker: Instance) -> bool:
        """Tell whether every prefill worker can hand KV entries over to that decode worker."""
        return all(each.can_hand_over_to(taker) for each in self._discovery.instances(self._component))

    def _place(self, call: Call, prefix_hit_rate: float, taker: Instance | None) -> PrefillPlace:
        if not self._settings.is_on:
            return PrefillPlace.OFF
        if self._queue is None or self._loop.time() < self._left_alone_until_s:
            return PrefillPlace.QUEUE_AWAY
        self._depth.keep(self._queue)
        return place_prefill(
            self._settings,
            call.prompt_tokens,
            prefix_hit_rate,
            self.queue_size,
            len(self._discovery.instances(self._component)),
            taker is None or self.can_reach(taker),
        )

    async def _computed(
        self, call: Call, blocks: PromptBlocks, trace: Mapping[str, str]
    ) -> PrefillAnswer | None:
        """Put the prompt on the queue; return the prefill worker's answer, None when none comes in time."""
        request_id = uuid.uuid4().hex
        request = self._timed(
            RemotePrefillRequest(
                request_id,
                path=call.endpoint.path,
                body=call.document,
                reply_to=self._reply_to,
                trace=trace,
            )
        )
        payload = request.to_json() if call.is_whole else request.to_json_around(call.body)
        if len(payload) > LARGEST_PAYLOAD_BYTES:
            return None
        pending = self._pending[request_id] = _Pending(self._loop.create_future(), payload)
        timer = self._loop.call_later(self._wait_s, _give_up, pending.answer)
        try:
            pending.direction = await self._director.direct(blocks, self._awake())
            if pending.direction:
                pending.look = self._loop.call_later(self._lane_patience_s, self._look_at_lane, pending)
            if not await self._enqueued(pending):
                return None
            return await pending.answer
        except asyncio.CancelledError:
            self._hand_offs.release(request_id)
            raise
        finally:
            timer.cancel()
            if pending.look:
                pending.look.cancel()
            del self._pending[request_id]
            if pending.direction:
                self._director.close(pending.direction)
            self._withdraw_unless_answered(pending)

    def _timed(self, request: RemotePrefillRequest) -> RemotePrefillRequest:
        """Add the times of a request that has just arrived, unless the order of arrival is wanted."""
        settings = self._settings
        if not settings.prefill_deadline_ms:
            return request
        now_s = self._wall_s()
        until_s = deadline_s(now_s, settings.prefill_deadline_ms, self._rest)
        return replace(
            request,
            arrived_unix_s=now_s,
            deadline_unix_s=until_s,
            owed_unix_s=until_s + settings.prefill_late_wait_s,
            waits_until_unix_s=now_s + self._wait_s,
        )

    async def _enqueued(self, pending: _Pending) -> bool:
        queue = pending.direction.queue if pending.direction else self._queue
        assert queue is not None
        try:
            async with asyncio.timeout(QUEUE_TIMEOUT_S):
                pending.sequence = await queue.put(pending.payload)
                pending.put_s = self._loop.time()
        except (DynaplanError, TimeoutError) as error:
            log.debug("the prefill queue did not take a request: %s", error)
            self._left_alone_until_s = self._loop.time() + QUEUE_TIMEOUT_S
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
            self._director.heard(answer.worker)
        pending = self._pending.get(answer.request_id)
        if pending and not pending.answer.done():
            self._hand_offs.hold(answer)
            pending.answer.set_result(answer)
        else:
            self._hand_offs.refuse(answer)

    def _wake_if_asleep(self) -> bool:
        """Have a prefill worker woken if all of them sleep; tell whether they do."""
        instances = self._discovery.instances(self._component)
        if self._sleepers is None or not self._sleepers.are_all(instances):
            return False
        if reason := self._sleepers.wake_one(instances):
            log.debug("every prefill worker sleeps: %s", reason)
        return True

    def _instance_of(self, worker: str) -> int:
        instances = self._discovery.instances(self._component)
        return next((each.instance_id for each in instances if each.worker == worker), 0)

    def _awake(self) -> list[Instance]:
        """Return the prefill workers that do not sleep."""
        instances = self._discovery.instances(self._component)
        return [each for each in instances if not (self._sleepers and each in self._sleepers)]

    def _take_back(self) -> None:
        """Put the prompts that were directed to a worker that has gone on the shared queue."""
        present = {each.instance_id: each for each in self._discovery.instances(self._component)}
        gone = [each for number, each in self._workers.items() if number not in present]
        self._workers = present
        for pending in self._pending.values():
            if pending.direction and pending.direction.instance.instance_id not in present:
                self._background.spawn(self._put_back(pending, "has gone"))
        for each in gone:
            if each.card.get(PREFILL_LANE):
                self._background.spawn(self._director.clear(each, self._lanes))

    def _look_at_lane(self, pending: _Pending) -> None:
        """Put a directed prompt on the shared queue if its worker has answered nothing for a while."""
        if pending.direction is None or pending.answer.done():
            return
        others = (each for each in self._awake() if each.worker != pending.direction.instance.worker)
        if any(others) and self._director.is_silent(pending.direction, self._lane_patience_s):
            self._background.spawn(self._put_back(pending, "answers nothing"))
        else:
            pending.look = self._loop.call_later(self._lane_patience_s, self._look_at_lane, pending)

    def _lanes(self) -> dict[str, Instance]:
        instances = self._discovery.instances(self._component)
        return {str(each.card.get(PREFILL_LANE)): each for each in instances}

    async def _put_back(self, pending: _Pending, why: str) -> None:
        direction, pending.direction = pending.direction, None
        if direction is None or pending.answer.done():
            return
        self._director.close(direction)
        log.info("%s %s: a prompt directed to it goes to the others", direction.instance.worker, why)
        if pending.sequence:
            await self._withdraw(pending.sequence)
        if not await self._enqueued(pending):
            _give_up(pending.answer)

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
            if pending.put_s < empty_s - ANSWER_S:
                _give_up(pending.answer)


def _give_up(answer: asyncio.Future[PrefillAnswer | None]) -> None:
    if not answer.done():
        answer.set_result(None)
