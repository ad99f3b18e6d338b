"""Parts of commands that reach other processes: over sockets, or by a terminal."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dynaplan.cli import join
from dynaplan.cli.status_document import read_routing
from dynaplan.http.messages import Request, Response
from dynaplan.http.routes import ROUTING_PATH, Route
from dynaplan.store import connections
from dynaplan.store.instances import PUBLIC_URL, Instance
from dynaplan.store.memory import MemoryStore
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import ConfigError
from dynaplan.util.sockets import bound_socket
from dynaplan.worker.server import WorkerServer


async def test_a_component_with_another_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(SystemClock())
    monkeypatch.setattr(store, "close", lambda: asyncio.sleep(0))
    monkeypatch.setattr(connections, "connect_store", lambda: store)
    monkeypatch.setattr(join, "TOKEN_CHECK_TIMEOUT_S", 30.0)

    async def who(_: Request) -> Response:
        return Response.json({})

    server = WorkerServer(bound_socket("127.0.0.1", 0), "the token of the namespace")
    await server.start([Route("GET", join.WHO_PATH, who, is_work=False)])
    worker = Instance("box", "Worker", "generate", 7, server.url, worker="box_VllmWorker_gpu1_9")
    silent = Instance("box", "Worker", "generate", 8, "http://127.0.0.1:1", worker="dead")
    elsewhere = Instance("box", "Worker", "generate", 9, server.url, host="gpu2", network="another boot/1")
    for each in (worker, silent, elsewhere):
        await store.put(each.key, each.to_json())
    await store.put("/services/box/W/generate/a", json.dumps("no registration"))
    try:
        with pytest.raises(ConfigError, match="not that of namespace box: box_VllmWorker_gpu1_9 refuses it"):
            await join._registered("box", "another token")
        assert await join._registered("box", "the token of the namespace") == (worker, silent, elsewhere)
    finally:
        await server.stop()


async def test_frontends_are_asked_and_silent_ones_left_out() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"w1": "events"})

    application = web.Application()
    application.router.add_get(ROUTING_PATH, answer)
    async with TestServer(application) as server:
        card = {PUBLIC_URL: "http://127.0.0.1:1"}
        url = str(server.make_url("")).rstrip("/")
        instances = [
            Instance("ns", "Frontend", "generate", 1, url, "f", card=card),
            Instance("ns", "Frontend", "generate", 2, "http://127.0.0.1:9", "g", card=card),
            Instance("ns", "VllmWorker", "generate", 3, "http://127.0.0.1:9", "w1"),
        ]
        assert await read_routing(instances) == {"w1": {"f": "events"}}


ROOT = Path(__file__).parents[2]

SCRIPT = """
import asyncio
from types import SimpleNamespace
from dynaplan.cli import top
from tests.unit.cli.status_documents import document, gpu_document, worker_document

async def poll():
    return document(worker_document(), gpus=[gpu_document(0, ("dynamo_VllmWorker",))], load=None)

async def close():
    print("closed")

asyncio.run(top._run(SimpleNamespace(poll=poll, close=close, found=None)))
"""


def until(screen: int, mark: bytes) -> bytes:
    """Read what is drawn until the mark is; a terminal that ends raises OSError."""
    text = b""
    while mark not in text:
        text += os.read(screen, 65536)
    return text


def test_it_draws_takes_keys_and_leaves_the_terminal_as_it_was() -> None:
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(terminal)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm"},
        stdin=terminal,
        stdout=terminal,
        start_new_session=True,
    )
    try:
        drawn = until(screen, b"quit")
        if b"dynamo_VllmWorker" not in drawn:
            drawn += until(screen, b"dynamo_VllmWorker")
        os.write(screen, b"?")
        until(screen, b"choose a worker")
        os.write(screen, b"qq")
        until(screen, b"closed")
        assert process.wait(30) == 0
        assert termios.tcgetattr(terminal) == before
    finally:
        process.kill()
        process.wait(30)
        os.close(screen)
        os.close(terminal)
