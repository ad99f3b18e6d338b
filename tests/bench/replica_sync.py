"""Two frontends that share workers, beside one: the hit rate and the balance of the same conversations.

In one process: real routers and a real replica sync over an event plane in memory; the workers only take
time, and their blocks are known to every router at once, as if told.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from random import Random
from statistics import mean

from dynaplan.config.settings.frontend import FrontendSettings
from dynaplan.events.component_events import ComponentEvents
from dynaplan.gateway.kv_routing.replica_sync import ReplicaSync
from dynaplan.gateway.kv_routing.router_inputs import CachedPrefixes, RouterInputs
from dynaplan.gateway.openai_api import COMPLETIONS, Call, parse_call
from dynaplan.gateway.routing.worker_router import WorkerRouter
from dynaplan.routing.booking import WorkerBook
from dynaplan.store.instances import Instance
from tests.bench.table import Row
from tests.fakes.memory_events import MemoryEventPlane

WORKERS = 8
CONVERSATIONS = 96
TURNS = 12
BLOCK = 16 * 4
CACHE_BLOCKS = 4000
PREFILL_S = 0.0004
DECODE_S = 0.03


class Workers:
    """The workers' caches, least recently used first out, and the load that each has had."""

    def __init__(self) -> None:
        self.instances_now = tuple(
            Instance("ns", "W", "generate", n, "http://x", f"w{n}", card={"tokenizer": "sim"})
            for n in range(1, WORKERS + 1)
        )
        self._caches: dict[int, OrderedDict[int, None]] = {
            each.instance_id: OrderedDict() for each in self.instances_now
        }
        self.blocks: Counter[int] = Counter()

    def instances(self, component: str) -> tuple[Instance, ...]:
        return self.instances_now

    def on_change(self, callback: Callable[[], None]) -> None:
        pass

    def is_current(self, instance_id: int) -> bool:
        return True

    def overlaps(self, hashes: Sequence[int]) -> dict[int, int]:
        return {worker: count for worker in self._caches if (count := self._held(worker, hashes))}

    def compute(self, worker: int, hashes: Sequence[int]) -> int:
        """Store a prompt; return the blocks that were there."""
        held, cache = self._held(worker, hashes), self._caches[worker]
        for block in reversed(hashes):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > CACHE_BLOCKS:
            cache.popitem(last=False)
        self.blocks[worker] += len(hashes) - held
        return held

    def _held(self, worker: int, hashes: Sequence[int]) -> int:
        cache = self._caches[worker]
        return next((depth for depth, block in enumerate(hashes) if block not in cache), len(hashes))


async def measured(frontends: int, *, is_synced: bool, seed: int) -> tuple[float, float]:
    """Return the hit rate of all blocks, and the busiest worker's computed blocks over the mean."""
    workers, plane, draw = Workers(), MemoryEventPlane(), Random(seed)
    settings = FrontendSettings(router="kv")
    routers: list[WorkerRouter] = []
    hits: list[tuple[int, int]] = []
    async with AsyncExitStack() as ends:
        for number in range(1, frontends + 1):
            router = await _router(number, workers, plane, settings, ends, is_synced=is_synced)
            routers.append(router)

        async def converse(name: int) -> None:
            family = f"system prompt {name % 6} ".ljust(BLOCK * 20, "s")
            own = Random(seed * 1000 + name)
            text = family
            for turn in range(TURNS):
                await asyncio.sleep(own.random() * 0.05)
                text += f"conversation {name} turn {turn} ".ljust(BLOCK * own.randint(2, 12), "t")
                router = routers[own.randrange(frontends)]
                booking = await router.book(_call(text), asyncio.get_running_loop().time() + 5)
                hashes = booking.blocks.hashes
                held = workers.compute(booking.instance.instance_id, hashes)
                hits.append((held, len(hashes)))
                await asyncio.sleep(PREFILL_S * (len(hashes) - held))
                booking.finish_prefill()
                await asyncio.sleep(DECODE_S * own.random())
                booking.close()

        names = list(range(CONVERSATIONS))
        draw.shuffle(names)
        await asyncio.gather(*map(converse, names))
    await plane.close()
    hit_rate = sum(held for held, _ in hits) / sum(blocks for _, blocks in hits)
    loads = [workers.blocks[each.instance_id] for each in workers.instances_now]
    return hit_rate, max(loads) / mean(loads)


async def _router(
    number: int,
    workers: Workers,
    plane: MemoryEventPlane,
    settings: FrontendSettings,
    ends: AsyncExitStack,
    *,
    is_synced: bool,
) -> WorkerRouter:
    sync = ReplicaSync(Replica(number, plane))
    inputs = RouterInputs(CachedPrefixes(settings, workers), replica_sync=sync)
    router = WorkerRouter(workers, "W", settings, inputs)  # type: ignore[arg-type]  # only discovery's part
    sync._replica.books = inputs.books
    if is_synced:
        sync.start()
        ends.push_async_callback(sync.close)
    return router


class Replica:
    """One frontend on an event plane that all share."""

    def __init__(self, instance_id: int, plane: MemoryEventPlane) -> None:
        self.instance_id = instance_id
        self.books: Mapping[int, WorkerBook] = {}
        self._plane = plane

    async def events(self) -> ComponentEvents:
        return ComponentEvents(self._plane, "ns", "Frontend")

    def record_remote_prompt(self, hashes: Sequence[int], instance_id: int) -> None:
        """Pass over it: engines report their blocks here."""


def _call(text: str) -> Call:
    return parse_call(COMPLETIONS, json.dumps({"model": "m", "prompt": text}).encode())


def rows(repeats: int) -> Iterator[Row]:
    """The hit rate and the imbalance of one frontend, of two that tell each other, and of two that do not."""
    ways = {"one frontend": (1, False), "two, replica sync": (2, True), "two, apart": (2, False)}
    for name, (frontends, is_synced) in ways.items():
        found = [asyncio.run(measured(frontends, is_synced=is_synced, seed=seed)) for seed in range(repeats)]
        yield Row(f"hit rate, {name}", "%", [100 * rate for rate, _ in found], more_is_better=True)
        yield Row(f"busiest worker over the mean, {name}", "", [imbalance for _, imbalance in found])
