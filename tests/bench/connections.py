"""Memory and loss with many connections: ``python -m tests.bench connections``.

Nearly 10,000 clients that ask for nothing, and after them 5,000 streams that are open at once, through the
frontend alone (``data_path.frontend``), with engines that give each stream a token every two seconds. This
needs 20,000 descriptors: a frontend takes half as many connections.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import uvloop

from dynaplan.util.descriptors import raise_descriptor_limit
from dynaplan.util.sockets import free_port
from tests.bench.data_path import program, wait_for
from tests.bench.data_path.load import Load, Stream
from tests.bench.table import Row
from tests.fakes.polling import eventually

IDLE, STREAMS, TOKENS = 9_800, 5_000, 8
STEP_MS = 2000.0
AT_ONCE = 200
"""Connections that are opened before the frontend gets its turn."""


class Silent(asyncio.Protocol):
    """A client that asks for nothing; ``lost`` counts those whose connection has gone."""

    lost = 0

    def connection_lost(self, exc: Exception | None) -> None:
        Silent.lost += 1


async def hold(port: int, frontend: psutil.Process) -> dict[str, Any]:
    """Open the connections, then the streams; return the memory in bytes, and what was lost."""
    loop = asyncio.get_running_loop()
    rss = [frontend.memory_info().rss]
    idle = []
    for begin in range(0, IDLE, AT_ONCE):
        opened = (loop.create_connection(Silent, "127.0.0.1", port) for _ in range(begin, begin + AT_ONCE))
        idle += [transport for transport, _ in await asyncio.gather(*opened)]
    await eventually(lambda: frontend.num_fds() > IDLE, 30)
    rss.append(frontend.memory_info().rss)
    lost = Silent.lost
    for transport in idle:
        transport.close()
    load = Load(TOKENS, STREAMS)
    streams: list[Stream] = []
    for begin in range(0, STREAMS, AT_ONCE):
        made = (
            loop.create_connection(lambda number=number: Stream(load, number), "127.0.0.1", port)
            for number in range(begin, begin + AT_ONCE)
        )
        streams += [stream for _, stream in await asyncio.gather(*made)]
    rss.append(frontend.memory_info().rss)
    await asyncio.gather(*(stream.done for stream in streams))
    return {"rss": rss, "lost": lost + load.failures + STREAMS - len(load.ttft_s)}


def rows(repeats: int) -> Iterator[Row]:
    """What a connection and a stream take, and how many were lost."""
    raise_descriptor_limit()
    idle_kib, stream_kib, lost = [], [], []
    for _ in range(repeats):
        with ExitStack() as stack:
            workers, port = [free_port(), free_port()], free_port()
            serve = (sys.executable, "-m", "tests.bench.data_path.workers", *map(str, workers), str(STEP_MS))
            stack.enter_context(program(serve))
            options = json.dumps({"max-connections": 20_000, "max-waiting-requests": STREAMS})
            command = (sys.executable, "-m", "tests.bench.data_path.frontend", str(port), options)
            process = stack.enter_context(program((*command, *map(str, workers))))
            wait_for(port)
            found = uvloop.run(hold(port, psutil.Process(process.pid)))
        before, with_idle, with_streams = found["rss"]
        idle_kib.append((with_idle - before) / IDLE / 1024)
        stream_kib.append((with_streams - before) / STREAMS / 1024)
        lost.append(found["lost"])
        Silent.lost = 0
    yield Row(f"memory of an idle connection, of {IDLE}", "KiB", idle_kib)
    yield Row(f"memory of an open stream, of {STREAMS}", "KiB", stream_kib)
    yield Row("connections and streams lost", "", lost, 0)
