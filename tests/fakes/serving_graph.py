"""A graph of one decode worker whose engine is a server of its own. It copies, of vLLM's:

- its HTTP port answers everybody who bears the token, also while it is asked to end: it refuses nobody;
- it says how many requests it has;
- a stream ends with ``data: [DONE]`` unless the engine is stopped before;
- it is a child process, which is slow to start and deaf to SIGTERM.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from dynaplan.engines import registry
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.http.routes import Route
from dynaplan.sdk import async_on_start, dynamo_context, service
from dynaplan.util.errors import PermanentError


class ServingEngine:
    """``die`` and ``finish`` are asked for at ``POST /die`` and ``POST /finish``."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._child: subprocess.Popen[bytes] | None = None
        self._finish = asyncio.Event()
        self._die = asyncio.Event()
        self._runner: web.ServerRunner | None = None
        self._requests = 0
        self.url = ""

    async def start(self) -> None:
        self._child = subprocess.Popen(["sh", "-c", "trap '' TERM; exec sleep 600"])  # noqa: ASYNC220
        print(f"the engine is {self._child.pid}", flush=True)
        await asyncio.sleep(float(self._options.get("startup-time", 0)))
        self._runner = web.ServerRunner(web.Server(self._handle), shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self, *, keeps_cache: bool = False) -> None:
        if self._runner:
            await self._runner.cleanup()
        if self._child:
            self._child.kill()
            self._child.wait()
        print("the engine is stopped", flush=True)

    async def wait_for_failure(self) -> None:
        await self._die.wait()
        raise PermanentError("the engine died")

    async def count_requests(self) -> int:
        return self._requests

    async def sleep(self, level: str) -> str:
        return "it has no way to sleep."

    async def wake(self) -> str:
        return ""

    def load(self) -> WorkerLoad:
        return WorkerLoad(running_requests=self._requests)

    def metrics(self) -> Mapping[str, float]:
        return {}

    def routes(self) -> Sequence[Route]:
        return ()

    def card(self) -> Mapping[str, Any]:
        return {"model": "m", "engine": "fake"}

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/finish":
            self._finish.set()
        elif request.path == "/die":
            self._die.set()
        else:
            return await self._stream(request)
        return web.Response()

    async def _stream(self, request: web.BaseRequest) -> web.StreamResponse:
        self._requests += 1
        try:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"data: {}\n\n")
            await self._finish.wait()
            await response.write_eof(b"data: [DONE]\n\n")
            return response
        finally:
            self._requests -= 1


@service(dynamo={"component_type": "decode"}, resources={"gpu": 1})
class Serving:
    @async_on_start
    async def begin(self) -> None:
        from dynaplan.worker.engine_worker import start_decode_worker

        registry.make_engine = lambda _, options, __: ServingEngine(options)  # type: ignore[assignment,return-value]
        await start_decode_worker(dynamo_context["runtime"])
