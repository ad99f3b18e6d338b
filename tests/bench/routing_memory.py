"""A million requests through the router's bookkeeping: what of it stays in memory.

``python -m tests.bench.routing_memory told|predicted REQUESTS`` prints, of one process that has routed that
many, its objects and its resident memory in MiB. Real parts: the router with its books, the index of told
blocks or the prediction, poison requests, the counts of what caches served, and the metrics. The engines'
blocks are a bounded cache each; requests are conversations of random lengths, and workers come and go.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from random import Random

from prometheus_client import CollectorRegistry

from dynaplan.config.settings.frontend import FrontendSettings
from dynaplan.gateway.kv_routing.router_inputs import CachedPrefixes, RouterInputs
from dynaplan.gateway.openai_api import COMPLETIONS, Call
from dynaplan.gateway.poison_requests import PoisonRequests
from dynaplan.gateway.router_metrics import RouterMetrics
from dynaplan.gateway.routing.worker_router import Booking, WorkerRouter
from dynaplan.routing.kv_index import KvIndex
from dynaplan.store.instances import Instance
from tests.bench.table import Row

WORKERS = 4
CACHE_BLOCKS = 2000
IN_FLIGHT = 64
NEW_WORKER_EVERY = 20_000
SETTLED = 100_000
"""Requests after which every cache, index and queue is full."""

REQUESTS = 1_000_000
MOST_MIB_MORE = 8.0
CARD = {"tokenizer": "sim", "kv_block_tokens": 4}


def rows(_: int) -> Iterator[Row]:
    """Measured once: minutes each, and it hardly varies."""
    for source in ("told", "predicted"):
        command = [sys.executable, "-m", "tests.bench.routing_memory", source, str(REQUESTS)]
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
        settled, end = json.loads(answer.stdout)
        more_mib = end["mib"] - settled["mib"]
        more = end["objects"] - settled["objects"]
        name = f"kv, {source}: from {SETTLED:,} to {REQUESTS:,} requests"
        yield Row(f"{name}, objects", "more", [more], 1000)
        yield Row(f"{name}, memory ({end['mib']:.0f} MiB in the end)", "MiB more", [more_mib], MOST_MIB_MORE)


class Fleet:
    """Discovery and engines: workers that come and go, each with a bounded cache that tells the index."""

    def __init__(self, index: KvIndex | None) -> None:
        self._index = index
        self._caches: dict[int, OrderedDict[int, None]] = {}
        self._changed: Callable[[], None] = lambda: None
        self._ids = 0
        self.now: tuple[Instance, ...] = ()
        for _ in range(WORKERS):
            self._come()

    def instances(self, component: str) -> tuple[Instance, ...]:
        return self.now

    def on_change(self, callback: Callable[[], None]) -> None:
        self._changed = callback

    def is_current(self, instance_id: int) -> bool:
        return True

    def overlaps(self, hashes: Sequence[int]) -> dict[int, int]:
        assert self._index is not None
        return self._index.overlaps(hashes)

    def replace_one(self) -> None:
        """The oldest worker leaves, and a new one comes."""
        gone, *self_now = self.now
        self.now = tuple(self_now)
        del self._caches[gone.instance_id]
        if self._index:
            self._index.remove_worker(gone.instance_id)
            while self._index.sweep():
                pass
        self._come()
        self._changed()

    def compute(self, worker: int, hashes: Sequence[int]) -> None:
        cache = self._caches.get(worker)
        if cache is None or self._index is None:
            return
        fresh = [block for block in hashes if block not in cache]
        cache.update(dict.fromkeys(fresh))
        gone = [cache.popitem(last=False)[0] for _ in range(len(cache) - CACHE_BLOCKS)]
        self._index.add(worker, fresh)
        self._index.remove(worker, gone)

    def _come(self) -> None:
        self._ids += 1
        self._caches[self._ids] = OrderedDict()
        self.now += (
            Instance(
                "ns", "W", "generate", self._ids, "http://127.0.0.1:9", f"w{self._ids % WORKERS}", card=CARD
            ),
        )


async def routed(source: str, requests: int) -> list[dict[str, float]]:
    """Route that many; return what is held after ``SETTLED``, and in the end, with nothing in flight."""
    index = KvIndex() if source == "told" else None
    fleet, dice = Fleet(index), Random(1)
    settings = FrontendSettings(router="kv", router_max_tree_size=50_000, router_ttl_s=5.0)
    metrics = RouterMetrics("ns", "W", CollectorRegistry())
    inputs = RouterInputs(CachedPrefixes(settings, fleet if index else None))
    router = WorkerRouter(
        fleet,  # type: ignore[arg-type]
        "W",
        settings,
        inputs,
        metrics=metrics,
    )
    now_s = asyncio.get_running_loop().time
    poison = PoisonRequests(now_s)
    talks = [f"conversation {number} " for number in range(200)]
    flying: deque[Booking] = deque()
    held = []
    for number in range(1, requests + 1):
        talk = dice.randrange(len(talks))
        talks[talk] += f"turn {number} "
        if len(talks[talk]) > 400:
            talks[talk] = f"conversation {number} "
        call = Call(COMPLETIONS, b"{}", {}, "m", True, talks[talk], len(talks[talk]) // 4)
        with closing(await poison.admit(call)) as suspect:
            booking = await router.book(call, 0.0)
            suspect.sent_to(booking.instance)
            booking.finish_prefill()
            poison.clear(suspect.call)
        fleet.compute(booking.instance.instance_id, booking.blocks.hashes)
        flying.append(booking)
        if len(flying) > IN_FLIGHT:
            done = flying.popleft()
            done.record_decoded(dice.randrange(1, 300))
            done.close()
        if number % NEW_WORKER_EVERY == 0:
            fleet.replace_one()
        if number in (SETTLED, requests):
            while flying:
                flying.popleft().close()
            assert all(book.in_flight == book.active_blocks == 0 for book in inputs.books.values())
            held.append(_held())
    return held


def _held() -> dict[str, float]:
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"objects": len(gc.get_objects()), "mib": int(status["VmRSS"].split()[0]) / 1024}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(routed(sys.argv[1], int(sys.argv[2])))))
