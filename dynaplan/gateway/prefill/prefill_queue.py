"""The prefill queue as a frontend sees it: its depth, and the queues of single prefill workers.

**Depth.** It is read in the background, so that no request waits for the reading.

**Prefix routing.** A prefill worker that names a queue of its own on its card takes prompts from there, and
no other worker does. A prompt is put there when its cached prefix saves more than the prompts that wait there
already cost; else it goes to the shared queue. When the worker leaves, its waiting prompts go back to the
shared queue.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from dynaplan.events.port import Messenger, WorkQueue
from dynaplan.gateway import timing
from dynaplan.gateway.kv_routing.router_inputs import ReportedBlocks
from dynaplan.gateway.openai_api import PromptBlocks
from dynaplan.routing.disaggregation import QueueReading, route_prefill
from dynaplan.store.instances import PREFILL_WORKER_QUEUE, Instance
from dynaplan.util.errors import DynaplanError

log = logging.getLogger(__name__)


class PrefillDepth:
    """Estimates the queue's depth from the last reading and the change of this frontend's own requests since.

    ``own`` returns the number of this frontend's requests in the queue now. ``found_empty`` is called after
    each reading of 0, with the time (on the loop's clock) at which that reading began.
    """

    def __init__(self, own: Callable[[], int], found_empty: Callable[[float], None]) -> None:
        self._own = own
        self._found_empty = found_empty
        self._loop = asyncio.get_running_loop()
        self._reading = QueueReading()
        self._asked_s = float("-inf")
        self._task: asyncio.Task[None] | None = None

    @property
    def estimate(self) -> int:
        return self._reading.estimate(self._own())

    def keep(self, queue: WorkQueue) -> None:
        """Keep reading the depth for the next ``QUEUE_BUSY_S``, and then until the queue is empty."""
        self._asked_s = self._loop.time()
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(self._poll(queue))

    async def close(self) -> None:
        """Cancel the reading of the queue's depth; the last value stays."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _poll(self, queue: WorkQueue) -> None:
        while (is_busy := self._loop.time() - self._asked_s < timing.QUEUE_BUSY_S) or self.estimate:
            await self._read(queue)
            await asyncio.sleep(timing.QUEUE_DEPTH_POLL_S if is_busy else timing.QUEUE_DEPTH_IDLE_POLL_S)

    async def _read(self, queue: WorkQueue) -> None:
        started_s, own = self._loop.time(), self._own()
        try:
            self._reading = QueueReading(await queue.depth(), own)
        except DynaplanError as error:
            log.debug("the prefill queue's depth cannot be read: %s", error)
            self._reading = QueueReading()
            return
        if not self._reading.depth:
            self._found_empty(started_s)


@dataclass(eq=False)
class RoutedPrompt:
    """One prompt in the queue of a prefill worker; ``blocks`` of it are left to compute there."""

    instance: Instance
    queue: WorkQueue
    blocks: int


class PrefillRouter:
    """Routes prompts to prefill workers by prefix, and counts this frontend's prompts at each."""

    def __init__(
        self, stream: str, connect: Callable[[], Awaitable[Messenger]], reported: ReportedBlocks | None
    ) -> None:
        self._stream = stream
        self._connect = connect
        self._reported = reported
        self._queues: dict[str, WorkQueue] = {}
        self._waiting_blocks: dict[int, int] = {}
        self._answered_s: dict[str, float] = {}
        self._silent: set[str] = set()
        self._now_s: Callable[[], float] = asyncio.get_running_loop().time

    async def route(self, blocks: PromptBlocks, instances: Sequence[Instance]) -> RoutedPrompt | None:
        """Choose a worker's queue for a prompt, and count it there until ``close``; None: the shared one."""
        reported = self._reported
        if reported is None or not blocks.prompt_tokens:
            return None
        known = {
            each.instance_id: each
            for each in instances
            if each.card.get(PREFILL_WORKER_QUEUE)
            and reported.is_current(each.instance_id)
            and each.worker not in self._silent
        }
        overlaps = {each: count for each, count in reported.overlaps(blocks.hashes).items() if each in known}
        workers = [each.instance_id for each in instances]
        chosen = route_prefill(workers, overlaps, self._waiting_blocks)
        if chosen is None:
            return None
        try:
            queue = await self._worker_queue(str(known[chosen].card[PREFILL_WORKER_QUEUE]))
        except DynaplanError as error:
            log.debug("no queue of %s: %s", known[chosen].worker, error)
            return None
        left = len(blocks.hashes) - overlaps[chosen]
        self._waiting_blocks[chosen] = self._waiting_blocks.get(chosen, 0) + left
        return RoutedPrompt(known[chosen], queue, left)

    def record_answer(self, worker: str) -> None:
        """Record an answer of this worker: it gets prompts, again if it was silent."""
        self._answered_s[worker] = self._now_s()
        self._silent.discard(worker)

    def is_silent(self, routed: RoutedPrompt, patience_s: float) -> bool:
        """Return whether the worker has not answered for that time; then it gets no more until it does."""
        worker = routed.instance.worker
        if self._answered_s.get(worker, -math.inf) > self._now_s() - patience_s:
            return False
        self._silent.add(worker)
        return True

    def close(self, routed: RoutedPrompt) -> None:
        """Record that the prompt has left the worker's queue."""
        instance_id = routed.instance.instance_id
        left = self._waiting_blocks.get(instance_id, 0) - routed.blocks
        self._waiting_blocks.pop(instance_id, None)
        if left > 0:
            self._waiting_blocks[instance_id] = left

    async def clear(self, gone: Instance, present: Callable[[], Mapping[str, object]]) -> None:
        """Clear the queue of a worker that left, after a delay; not if ``present()`` then has its name."""
        name = str(gone.card[PREFILL_WORKER_QUEUE])
        self._silent.discard(gone.worker)
        self._answered_s.pop(gone.worker, None)
        await asyncio.sleep(timing.WORKER_QUEUE_CLEAR_DELAY_S)
        if name in present():
            return
        try:
            await (await self._worker_queue(name)).clear()
        except DynaplanError as error:
            log.debug("what is left in the queue of %s stays: %s", gone.worker, error)

    async def _worker_queue(self, name: str) -> WorkQueue:
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = await (await self._connect()).queue(self._stream, name)
        return queue
