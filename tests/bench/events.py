"""Events over NATS: how many in a second, the CPU of each side, and how late they come.

Publisher and subscriber are processes of their own: ``python -m tests.bench.events publish|subscribe ...``.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

from dynaplan.events.port import EventPlane
from dynaplan.events.subjects import Subject
from tests.bench.table import Row
from tests.fakes.servers import start_nats

SUBJECT = Subject("bench", "backend", "kv_cache_update")
PAYLOAD_BYTES = 500
EVENTS = 20_000
PACED_EVENTS = 2000
PACE_S = 0.0025
"""Time between two events of the measurement of latency: 400 a second, as of eight busy workers."""


def rows(repeats: int) -> Iterator[Row]:
    """Measure events that are kept, and others."""
    for kept in ("kept", "not kept"):
        fast = [_measured(kept, EVENTS, 0.0) for _ in range(repeats)]
        paced = [_measured(kept, PACED_EVENTS, PACE_S) for _ in range(repeats)]
        name = f"events over nats, {kept}"
        rates = [each["rate"] for each in fast]
        yield Row(f"{name}: as fast as it goes", "1/s", rates, more_is_better=True)
        yield Row(f"{name}: CPU of the publisher", "us", [each["publisher_us"] for each in fast])
        yield Row(f"{name}: CPU of the subscriber", "us", [each["subscriber_us"] for each in fast])
        yield Row(f"{name}: latency at 400/s", "ms", [each["latency_ms"] for each in paced])


def _measured(kept: str, events: int, pace_s: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="dp-") as directory:
        nats = start_nats(Path(directory))
        try:
            environ = {**os.environ, **nats.environment}

            def run(what: str) -> subprocess.Popen[str]:
                command = [sys.executable, "-m", "tests.bench.events", what, kept, str(events), str(pace_s)]
                pipe = subprocess.PIPE
                return subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, text=True)

            subscriber = run("subscribe")
            assert subscriber.stdout
            subscriber.stdout.readline()
            publisher = run("publish")
            assert publisher.stdout
            found = json.loads(publisher.stdout.readline())
            found |= json.loads(subscriber.communicate(timeout=300)[0])
            publisher.communicate(timeout=300)
            return found
        finally:
            nats.kill()


@asynccontextmanager
async def _connected() -> AsyncIterator[EventPlane]:
    from dynaplan.events import event_connections

    plane = await event_connections.connect_events()
    yield plane
    await plane.close()


async def publish(is_kept: bool, events: int, pace_s: float) -> None:
    async with _connected() as plane:
        publisher = plane.publisher(SUBJECT, is_kept=is_kept)
        await publisher.publish(b"")  # the first one finds its way
        begun_s = time.process_time()
        for number in range(events):
            await publisher.publish(b"%020d" % time.time_ns() + bytes(PAYLOAD_BYTES))
            if pace_s or number % 64 == 0:
                await asyncio.sleep(pace_s)
        await plane.flush(60)
        cpu_s = time.process_time() - begun_s
        print(json.dumps({"publisher_us": 1e6 * cpu_s / events}), flush=True)
        await asyncio.to_thread(sys.stdin.read)  # the subscriber may have to ask for what it has missed


async def subscribe(events: int) -> None:
    async with _connected() as plane:
        subscription = await plane.subscribe(str(SUBJECT))
        print("ready", flush=True)
        await anext(subscription)
        begun_s, late_ms, received = time.process_time(), [], 0
        first_s = 0.0
        while received < events:
            event = await anext(subscription)
            received += 1 + event.missed
            first_s = first_s or time.monotonic()
            late_ms.append((time.time_ns() - int(event.payload[:20])) / 1e6)
        cpu_us = 1e6 * (time.process_time() - begun_s) / len(late_ms)
        rate = len(late_ms) / (time.monotonic() - first_s)
        print(json.dumps({"subscriber_us": cpu_us, "rate": rate, "latency_ms": median(late_ms)}))


if __name__ == "__main__":
    what, kept, events, pace_s = sys.argv[1:]
    if what == "publish":
        asyncio.run(publish(kept == "kept", int(events), float(pace_s)))
    else:
        asyncio.run(subscribe(int(events)))
