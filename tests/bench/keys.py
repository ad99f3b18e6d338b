"""What keys cost a frontend, and what a script costs a person: ``python -m tests.bench keys``.

*Cost*: the processor time of two frontends that have the same load at the same time, so that all else that
the machine does falls on both alike; one has a file of 50 keys with limits. Streams are one or two for each
key: who has one thing in hand never waits. *Turns*: a deployment with one simulated engine of 16 places; a
person asks one request at a time, first alone and then beside a script that sent ``SCRIPT`` at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import quantiles
from typing import Any

import aiohttp

from dynaplan.util.sockets import free_port
from tests.bench.data_path import measure, program, wait_for
from tests.bench.deployments import serving
from tests.bench.table import Row
from tests.e2e.deployment import MODEL
from tests.fakes.keys import bearer, write_keys
from tests.fakes.polling import wait_until

KEYS, TOKENS, REQUESTS = 50, 32, 6_400
STEP_MS = 5.0
SCRIPT = int(os.environ.get("DYNAPLAN_REQUESTS", "2000"))
PERSON_PAUSE_S, ALONE_S = 0.2, 10.0
LIMITS: dict[str, Any] = {"concurrency": 10_000, "requests-per-minute": 10**6, "tokens-per-minute": 10**9}
PLACES = ("--VllmWorker.max-num-seqs=16", f"--Frontend.max-waiting-requests={SCRIPT}")


def rows(repeats: int) -> Iterator[Row]:
    yield from _cost(repeats)
    yield from _turns()


def _cost(repeats: int) -> Iterator[Row]:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        names = {f"bench{key}": LIMITS for key in range(KEYS)}
        file = write_keys(directory / "keys.yaml", names)
        frontends = [
            (*_frontend(stack, options), keys) for keys, options in ((0, {}), (KEYS, {"api-keys": str(file)}))
        ]
        for each, aim in ((1, 3.0), (2, None)):
            with ThreadPoolExecutor() as threads:
                rounds = [
                    tuple(threads.map(lambda which, each=each: _cpu_ms(*which, each * KEYS), frontends))
                    for _ in range(repeats)
                ]
            more = [100 * (with_keys / without - 1) for without, with_keys in rounds]
            yield Row(f"CPU of a request with {KEYS} keys over none, {each} at a time each", "%", more, aim)
            yield Row("the same without keys", "ms", [without for without, _ in rounds])


def _frontend(stack: ExitStack, options: dict[str, str]) -> tuple[int, int]:
    """Start a frontend with two workers of its own; return its port and its process."""
    workers, port = [free_port(), free_port()], free_port()
    serve = (sys.executable, "-m", "tests.bench.data_path.workers", *map(str, workers), str(STEP_MS))
    stack.enter_context(program(serve))
    wait_for(workers[0])
    command = (sys.executable, "-m", "tests.bench.data_path.frontend", str(port), json.dumps(options))
    process = stack.enter_context(program((*command, *map(str, workers))))
    wait_until(lambda: _is_listening(port))
    return port, process.pid


def _is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def _cpu_ms(port: int, pid: int, keys: int, streams: int) -> float:
    return measure(port, pid, streams, TOKENS, REQUESTS, keys)[0]


def _turns() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as directory:
        file = write_keys(Path(directory) / "keys.yaml", {"script": {}, "person": {}})
        for is_keyed in (False, True):
            options = ("--api-keys", str(file)) if is_keyed else ()
            with serving("graphs.agg:Frontend", "agg.yaml", *PLACES, *options) as deployment:
                alone_s, beside_s, script_alone_s, script_s = asyncio.run(_beside(deployment.url))
            how = "with keys" if is_keyed else "without keys"
            p95_s = [quantiles(each, n=20)[-1] if len(each) > 1 else each[0] for each in (alone_s, beside_s)]
            yield Row(f"TTFT p95 of a person alone, {how}", "ms", [1000 * p95_s[0]])
            aim = 2.0 if is_keyed else None
            yield Row(
                f"the same beside a script of {SCRIPT}, over alone, {how}", "x", [p95_s[1] / p95_s[0]], aim
            )
            yield Row(f"the script beside the person, over alone, {how}", "x", [script_s / script_alone_s])


async def _beside(url: str) -> tuple[list[float], list[float], float, float]:
    """Return the person's TTFT alone and beside the script, and the script's time alone and beside it."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout()) as session:

        async def ask(name: str, tokens: int) -> float:
            body = {"model": MODEL, "prompt": "Why is the sky blue? " * 40, "max_tokens": tokens}
            begun_s = time.monotonic()
            headers = bearer(name)
            path = f"{url}/v1/completions"
            async with session.post(path, json={**body, "stream": True}, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                await answer.content.readline()
                first_s = time.monotonic() - begun_s
                await answer.read()
            return first_s

        async def person(until: asyncio.Future[Any]) -> list[float]:
            times_s = []
            while not until.done():
                times_s.append(await ask("person", 20))
                await asyncio.sleep(PERSON_PAUSE_S)
            return times_s

        async def script() -> float:
            begun_s = time.monotonic()
            await asyncio.gather(*(ask("script", 50 + number % 100) for number in range(SCRIPT)))
            return time.monotonic() - begun_s

        alone_s = await person(asyncio.create_task(asyncio.sleep(ALONE_S)))
        script_alone_s = await script()
        running = asyncio.create_task(script())
        beside_s = await person(running)
        return alone_s, beside_s, script_alone_s, await running
