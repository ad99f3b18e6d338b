"""The key-value stores side by side: times of calls and watches, of a death, of many instances, and idle
cost.

A backend is added to ``STORES``. Its servers are the embedded ones; directories lie in memory
(``/dev/shm``) where there is some.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from statistics import median

import psutil

from dynaplan.process.guard import guard_command
from dynaplan.store.etcd import EtcdStore
from dynaplan.store.file_store import FileStore
from dynaplan.store.model import Put, Snapshot, WatchEvent
from dynaplan.store.nats_store import NatsStore
from dynaplan.store.port import Store
from tests.bench.table import Row
from tests.fakes.servers import start_etcd, start_nats

CALLS = 300
INSTANCES = 1000
AT_ONCE = 32
IDLE_S = 10.0
TTL_S = 10

Connect = Callable[[], Store]
Opened = AbstractAsyncContextManager[tuple[dict[str, str], int | None]]

HOLDER = """
import asyncio, os

async def main():
    store = CONNECT[os.environ["BENCH_STORE"]](os.environ)
    lease = await store.grant(10)
    await store.put("v1/instances/held", "x" * 300, lease)
    print("ready", flush=True)
    while True:
        await asyncio.sleep(3)
        await store.keep_alive(lease)

asyncio.run(main())
"""

CONNECT = {
    "etcd": EtcdStore.from_environment,
    "file": FileStore.from_environment,
    "nats": NatsStore.from_environment,
}


@asynccontextmanager
async def _etcd(directory: Path) -> AsyncIterator[tuple[dict[str, str], int | None]]:
    server = await asyncio.to_thread(start_etcd, directory)
    try:
        yield server.environment, server.pid
    finally:
        server.kill()


@asynccontextmanager
async def _nats(directory: Path) -> AsyncIterator[tuple[dict[str, str], int | None]]:
    server = await asyncio.to_thread(start_nats, directory)
    try:
        yield server.environment, server.pid
    finally:
        server.kill()


@asynccontextmanager
async def _file(directory: Path) -> AsyncIterator[tuple[dict[str, str], int | None]]:
    yield {"DYN_FILE_KV": str(directory / "kv")}, None


STORES = {"etcd": _etcd, "nats": _nats, "file": _file}
"""Backend -> its environment, and the pid of its server if it has one."""


def rows(repeats: int) -> Iterator[Row]:
    """Measure each store in turn."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    for name, opened in STORES.items():
        with tempfile.TemporaryDirectory(prefix="dp-", dir=place) as directory:
            yield from asyncio.run(_measured(name, opened(Path(directory)), repeats))


async def _measured(name: str, opened: Opened, repeats: int) -> list[Row]:
    found: dict[tuple[str, str, float | None], list[float]] = {}
    async with opened as (environment, server):

        def connect() -> Store:
            return CONNECT[name]({**os.environ, **environment})

        for what, unit, aim, measure in (
            ("put", "ms", None, _put_ms),
            ("get", "ms", None, _get_ms),
            ("watch latency", "ms", None, _watch_ms),
            (f"{INSTANCES} instances join, until a watch has seen all", "s", None, _join_s),
            (f"{INSTANCES} instances leave, until a watch has seen all", "s", None, _leave_s),
        ):
            for _ in range(repeats):
                found.setdefault((what, unit, aim), []).append(await measure(connect))
        for _ in range(min(repeats, 3)):
            died_s = await _death_s(name, {**os.environ, **environment}, connect)
            found.setdefault(("death of a process noticed by a watch", "s", 0.2), []).append(died_s)
        key = ("idle: a watch of 16 renewed leases, with the server", "% of one core", None)
        found[key] = [await _idle_percent(connect, server)]
    return [Row(f"{name}: {what}", unit, values, aim) for (what, unit, aim), values in found.items()]


async def _put_ms(connect: Connect) -> float:
    store = connect()
    await store.identity()
    value = await _median_ms(lambda number: store.put(f"v1/bench/{number}", "x" * 300))
    await store.close()
    return value


async def _get_ms(connect: Connect) -> float:
    store = connect()
    await store.put("v1/bench/0", "x" * 300)
    value = await _median_ms(lambda _: store.get("v1/bench/0"))
    await store.close()
    return value


async def _median_ms(call: Callable[[int], Coroutine[object, object, object]]) -> float:
    times = []
    for number in range(CALLS):
        begun_s = time.perf_counter()
        await call(number)
        times.append(1000 * (time.perf_counter() - begun_s))
    return median(times)


async def _watch_ms(connect: Connect) -> float:
    """From the beginning of a put by one client to the event in the watch of another."""
    writer, reader = connect(), connect()
    events = _Events(reader, "v1/watched/")
    await events.begun.wait()
    times = []
    for number in range(CALLS):
        begun_s = time.perf_counter()
        await writer.put(f"v1/watched/{number % 10}", str(number))
        await events.until(lambda: events.known.get(f"v1/watched/{number % 10}") == str(number))  # noqa: B023
        times.append(1000 * (time.perf_counter() - begun_s))
    await events.stop()
    await writer.close()
    await reader.close()
    return median(times)


async def _join_s(connect: Connect) -> float:
    return (await _instances(connect))[0]


async def _leave_s(connect: Connect) -> float:
    return (await _instances(connect))[1]


async def _instances(connect: Connect) -> tuple[float, float]:
    """Each instance is a lease with one key; some clients at once, as many processes do."""
    store, reader = connect(), connect()
    events = _Events(reader, "v1/instances/")
    await events.begun.wait()
    leases: list[int] = []

    async def join(numbers: Iterator[int]) -> None:
        for _ in numbers:
            lease = await store.grant(60)
            await store.put(f"v1/instances/bench/backend/generate/{lease:x}", "x" * 300, lease)
            leases.append(lease)

    async def leave(ended: Iterator[int]) -> None:
        for lease in ended:
            await store.revoke(lease)

    numbers = iter(range(INSTANCES))
    begun_s = time.perf_counter()
    await asyncio.gather(*(join(numbers) for _ in range(AT_ONCE)))
    await events.until(lambda: len(events.known) == INSTANCES)
    joined_s = time.perf_counter() - begun_s
    ended = iter(list(leases))
    begun_s = time.perf_counter()
    await asyncio.gather(*(leave(ended) for _ in range(AT_ONCE)))
    await events.until(lambda: not events.known)
    left_s = time.perf_counter() - begun_s
    await events.stop()
    await store.close()
    await reader.close()
    return joined_s, left_s


async def _death_s(name: str, environment: dict[str, str], connect: Connect) -> float:
    store = connect()
    events = _Events(store, "v1/instances/held")
    holder = _holder({**environment, "BENCH_STORE": name})
    assert holder.stdout is not None
    await asyncio.to_thread(holder.stdout.readline)
    await events.until(lambda: events.known)
    begun_s = time.perf_counter()
    holder.kill()
    await events.until(lambda: not events.known)
    noticed_s = time.perf_counter() - begun_s
    holder.communicate()
    await events.stop()
    await store.close()
    return noticed_s


def _holder(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    command = guard_command([sys.executable, "-c", HOLDER], os.getpid())
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)


async def _idle_percent(connect: Connect, server: int | None) -> float:
    """CPU time of this process, which renews 16 leases as 16 processes would, and of the server."""
    store = connect()
    events = _Events(store, "v1/")
    await events.begun.wait()
    leases = [await store.grant(TTL_S) for _ in range(16)]
    for lease in leases:
        await store.put(f"v1/instances/idle/{lease:x}", "x" * 300, lease)

    async def renew(lease: int) -> None:
        while True:
            await asyncio.sleep(TTL_S / 3)
            await store.keep_alive(lease)

    renewing = [asyncio.create_task(renew(lease)) for lease in leases]
    before_s, begun_s = _cpu_s(server), time.perf_counter()
    await asyncio.sleep(IDLE_S)
    used_s, lasted_s = _cpu_s(server) - before_s, time.perf_counter() - begun_s
    for task in renewing:
        task.cancel()
    await asyncio.gather(*renewing, return_exceptions=True)
    await events.stop()
    await store.close()
    return 100 * used_s / lasted_s


def _cpu_s(server: int | None) -> float:
    """CPU time of this process, and of the server if any (in ticks of 10 ms), in seconds."""
    return time.process_time() + (sum(psutil.Process(server).cpu_times()[:2]) if server else 0.0)


class _Events:
    """A watch, and what a reader of it knows: key -> value."""

    def __init__(self, store: Store, prefix: str) -> None:
        self.begun = asyncio.Event()
        self.known: dict[str, str] = {}
        self._news = asyncio.Condition()
        self._task = asyncio.create_task(self._read(store.watch(prefix)))

    async def _read(self, events: AsyncIterator[WatchEvent]) -> None:
        async for event in events:
            self.begun.set()
            async with self._news:
                if isinstance(event, Snapshot):
                    self.known = {item.key: item.value for item in event.items}
                elif isinstance(event, Put):
                    self.known[event.item.key] = event.item.value
                else:
                    self.known.pop(event.key, None)
                self._news.notify_all()

    async def until(self, is_so: Callable[[], object]) -> None:
        async with self._news:
            await self._news.wait_for(is_so)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
