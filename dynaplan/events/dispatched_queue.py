"""The shared prefill queue as one prefill worker takes from it, by deadline where its prompts have one.

The live consumer of ``events/dispatch_order.py``. Late prompts wait in a lane of the queue that all
prefill workers take from. A worker that comes upon a late prompt moves it there, and keeps at most one of
that lane in hand, so that it knows how long the oldest has waited. It computes that one when the shared queue
gives nothing, or when it is owed. A prompt that nobody waits for any more is dropped.

Deadlines are wall times, in seconds since 1970: the clocks of all hosts must agree to some 10 ms, as NTP
keeps them. Where they do not, prompts are computed in another order, and nothing else happens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from dynaplan.events.dispatch_order import DispatchRule, UsualTime
from dynaplan.events.port import WorkItem, WorkQueue
from dynaplan.events.prefill_requests import RemotePrefillRequest
from dynaplan.events.timing import LATE_LANE_POLL_S, LATE_PROMPT_WAIT_S
from dynaplan.util.clock import Clock
from dynaplan.util.errors import QueueUnavailable

log = logging.getLogger(__name__)

LATE_LANE = "late"
"""The lane of late prompts, which every prefill worker takes from."""


class DispatchedQueue:
    """Gives one worker its next piece of work. Without deadlines it is the shared queue, and nothing else.

    ``open_late`` opens the lane, a queue beside the shared one, of prompts that would miss their deadline; it
    is not read before a prompt has a deadline. The caller reports to ``computed`` how long each prompt took.
    """

    def __init__(
        self,
        shared: WorkQueue,
        open_late: Callable[[], Awaitable[WorkQueue]],
        clock: Clock,
        wall_s: Callable[[], float],
    ) -> None:
        self._shared = shared
        self._open_late = open_late
        self._clock = clock
        self._wall_s = wall_s
        self._late: WorkQueue | None = None
        self._computing = UsualTime()
        self._in_hand: tuple[WorkItem, RemotePrefillRequest] | None = None
        self._is_free = asyncio.Event()
        self._is_free.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._since_owed = 0
        # The next late prompt is in hand a moment after the last one was released.
        self._had_late = False

    def computed(self, took_s: float) -> None:
        """Note the seconds from taking a prompt to its hand-over."""
        self._computing = self._computing.after(took_s)

    async def get(self, timeout_s: float) -> WorkItem | None:
        """Take the next piece of work by the rule; None when there is none within ``timeout_s`` seconds.

        Raises QueueUnavailable.
        """
        if self._in_hand and self._is_owed(self._in_hand[1]):
            self._since_owed = 0
            return self._release()
        has_late = self._in_hand is not None or self._had_late
        item = await self._in_time(LATE_PROMPT_WAIT_S if has_late else timeout_s)
        if item is None:
            item = self._release()
            self._had_late = item is not None
        self._since_owed += item is not None
        return item

    async def close(self) -> None:
        """Take nothing more, and leave the prompt in hand to the others."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        item = self._release()
        if item and self._late:
            with suppress(QueueUnavailable):
                await self._move(item, self._late)

    async def _in_time(self, timeout_s: float) -> WorkItem | None:
        until_s = self._clock.now_s() + timeout_s
        while item := await self._shared.get(timeout_s):
            request = _read(item)
            if request is None or not request.deadline_unix_s:
                return item
            if self._late is None:
                self._late = await self._open_late()
                self._tasks.append(asyncio.create_task(self._keep_one(self._late)))
            if not self._is_late(request):
                return item
            await self._drop_or_move(item, request, self._late)
            # More late prompts must not keep this worker from the late one in hand.
            timeout_s = min(LATE_PROMPT_WAIT_S, until_s - self._clock.now_s())
            if timeout_s <= 0:
                break
        return None

    def _is_late(self, request: RemotePrefillRequest) -> bool:
        times_s = request.arrived_unix_s, request.deadline_unix_s
        return DispatchRule(0.0).is_late(*times_s, self._wall_s(), self._computing.usual_s)

    async def _drop_or_move(self, item: WorkItem, request: RemotePrefillRequest, late: WorkQueue) -> None:
        if self._is_wanted(request):
            await self._move(item, late)
        else:
            await item.ack()

    async def _move(self, item: WorkItem, late: WorkQueue) -> None:
        """Put the work into the lane of late prompts, then acknowledge it where it was taken from.

        A crash in between leaves it in both: it is computed twice, and not lost.
        """
        await late.put(item.payload)
        await item.ack()

    async def _keep_one(self, late: WorkQueue) -> None:
        """Hold the oldest late prompt until ``get`` returns it, then take the next one, until cancelled."""
        while True:
            await self._is_free.wait()
            try:
                await self._take_one(late)
            except QueueUnavailable as error:
                log.debug("the lane of late prompts does not answer: %s", error)
                await self._clock.sleep(LATE_LANE_POLL_S)

    async def _take_one(self, late: WorkQueue) -> None:
        item = await late.get(LATE_LANE_POLL_S)
        request = _read(item) if item else None
        if item is None:
            return
        if request is None or not self._is_wanted(request):
            await item.ack()
            return
        self._in_hand = item, request
        self._is_free.clear()
        while self._in_hand and self._in_hand[0] is item:
            with suppress(QueueUnavailable):  # the next report comes in time, if the server does
                await item.in_progress()
            with suppress(TimeoutError):
                async with asyncio.timeout(
                    LATE_LANE_POLL_S
                ):  # wait_for of Python 3.11 may swallow a cancellation
                    await self._is_free.wait()

    def _release(self) -> WorkItem | None:
        if self._in_hand is None:
            return None
        item, self._in_hand = self._in_hand[0], None
        self._is_free.set()
        return item

    def _is_owed(self, request: RemotePrefillRequest) -> bool:
        rule = DispatchRule(max(0.0, request.owed_unix_s - request.deadline_unix_s))
        return rule.is_owed(request.deadline_unix_s, self._wall_s(), self._since_owed)

    def _is_wanted(self, request: RemotePrefillRequest) -> bool:
        """Tell whether the request still waits for this prefill."""
        return not request.waits_until_unix_s or self._wall_s() < request.waits_until_unix_s


def _read(item: WorkItem) -> RemotePrefillRequest | None:
    """Return the request; None for an invalid one, which the puller will drop."""
    try:
        return RemotePrefillRequest.from_json(item.payload)
    except ValueError:
        return None
