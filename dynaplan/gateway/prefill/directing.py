"""Direct prompts to the prefill worker that has most of them in its cache.

Such a worker has a lane in the prefill queue, which only it takes prompts from, and names it on its card. A
prompt is put there when its cached beginning saves more than the prompts that wait there already cost; else
it goes to the shared queue. When the worker goes, its waiting prompts go back to the shared queue.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from dynaplan.events.port import Messenger, WorkQueue
from dynaplan.events.prefill_requests import prefill_stream
from dynaplan.gateway.kv_routing.cached_prefixes import ToldBlocks
from dynaplan.gateway.openai_api import PromptBlocks
from dynaplan.gateway.prefill.disaggregation import directed_prefill
from dynaplan.store.instances import PREFILL_LANE, Instance
from dynaplan.util.errors import DynaplanError

log = logging.getLogger(__name__)

CLEARED_AFTER_S = 5.0
"""Time after which the lane of a worker that has gone is cleared: every frontend has taken its own back."""


@dataclass(eq=False)
class Direction:
    """One prompt in the lane of a prefill worker, of which ``blocks`` are left to compute there."""

    instance: Instance
    queue: WorkQueue
    blocks: int


class PrefillDirector:
    """Chooses lanes, and counts this frontend's prompts in each. ``told`` knows what workers have cached."""

    def __init__(
        self, namespace: str, connect: Callable[[], Awaitable[Messenger]], told: ToldBlocks | None
    ) -> None:
        self._stream = prefill_stream(namespace)
        self._connect = connect
        self._told = told
        self._lanes: dict[str, WorkQueue] = {}
        self._waiting_blocks: dict[int, int] = {}
        self._heard_s: dict[str, float] = {}
        self._silent: set[str] = set()
        self._now_s: Callable[[], float] = asyncio.get_running_loop().time

    async def direct(self, blocks: PromptBlocks, instances: Sequence[Instance]) -> Direction | None:
        """Return a place in the lane of one of the workers, until ``close``; None for the shared queue."""
        told = self._told
        if told is None or not blocks.prompt_tokens:
            return None
        known = {
            each.instance_id: each
            for each in instances
            if each.card.get(PREFILL_LANE)
            and told.is_current(each.instance_id)
            and each.worker not in self._silent
        }
        overlaps = {each: count for each, count in told.overlaps(blocks.hashes).items() if each in known}
        workers = [each.instance_id for each in instances]
        chosen = directed_prefill(workers, overlaps, self._waiting_blocks)
        if chosen is None:
            return None
        try:
            queue = await self._lane(str(known[chosen].card[PREFILL_LANE]))
        except DynaplanError as error:
            log.debug("no lane of %s: %s", known[chosen].worker, error)
            return None
        left = len(blocks.hashes) - overlaps[chosen]
        self._waiting_blocks[chosen] = self._waiting_blocks.get(chosen, 0) + left
        return Direction(known[chosen], queue, left)

    def heard(self, worker: str) -> None:
        """Note an answer of this worker: prompts are directed to it, again if it was silent."""
        self._heard_s[worker] = self._now_s()
        self._silent.discard(worker)

    def is_silent(self, direction: Direction, patience_s: float) -> bool:
        """Tell whether the worker has answered nothing for that time; then it gets no more until it does."""
        worker = direction.instance.worker
        if self._heard_s.get(worker, -math.inf) > self._now_s() - patience_s:
            return False
        self._silent.add(worker)
        return True

    def close(self, direction: Direction) -> None:
        """Note that the prompt is not in the lane any more."""
        instance_id = direction.instance.instance_id
        left = self._waiting_blocks.get(instance_id, 0) - direction.blocks
        self._waiting_blocks.pop(instance_id, None)
        if left > 0:
            self._waiting_blocks[instance_id] = left

    async def clear(self, gone: Instance, present: Callable[[], Mapping[str, object]]) -> None:
        """Clear the lane of a worker that has gone, after a while, unless another has the lane by then."""
        name = str(gone.card[PREFILL_LANE])
        self._silent.discard(gone.worker)
        self._heard_s.pop(gone.worker, None)
        await asyncio.sleep(CLEARED_AFTER_S)
        if name in present():
            return
        try:
            await (await self._lane(name)).clear()
        except DynaplanError as error:
            log.debug("what is left in the lane of %s stays: %s", gone.worker, error)

    async def _lane(self, name: str) -> WorkQueue:
        queue = self._lanes.get(name)
        if queue is None:
            queue = self._lanes[name] = await (await self._connect()).queue(self._stream, name)
        return queue
