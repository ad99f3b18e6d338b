"""The simulated engine with a server of its own, which frontends send to straight, as vLLM has one."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from msgspec.structs import replace

from dynaplan.engines.port import EngineContext
from dynaplan.engines.sim.engine import SimEngine
from dynaplan.http.messages import Request, Response, WholeBody
from dynaplan.http.routes import Route
from dynaplan.worker.server import WorkerServer
from tests.chaos.schedules.machine import Machine
from tests.chaos.schedules.virtual_time import PROCESS

HEARD_WITHIN_S = 3.0
"""Seconds after which every frontend that runs has heard that a worker leaves."""


class ServedEngine(SimEngine):
    """It refuses nothing while its worker drains: that no request comes then is the frontends' work."""

    def __init__(self, machine: Machine, options: Mapping[str, Any], context: EngineContext) -> None:
        super().__init__(options, context)
        self._machine = machine
        self._server = WorkerServer(cast(Any, machine.network.new_socket()), context.token)

    @property
    def url(self) -> str:
        return self._server.url

    async def start(self) -> None:
        await super().start()
        own = [each for each in super().routes() if each.path.startswith("/v1")]
        await self._server.start(
            [dataclasses.replace(each, handler=self._watched(each.handler)) for each in own]
        )

    def routes(self) -> Sequence[Route]:
        return [each for each in super().routes() if not each.path.startswith("/v1")]

    async def stop(self, *, keeps_cache: bool = False) -> None:
        await super().stop(keeps_cache=keeps_cache)
        await self._server.stop()

    def _watched(
        self, handler: Callable[[Request], Awaitable[Response | None]]
    ) -> Callable[[Request], Awaitable[Response | None]]:
        async def handle(http: Request) -> Response | None:
            body = await http.read()
            if b"word word" not in body:  # with a remote prefill it was booked long before
                self._look(http)
            return await handler(replace(http, body=WholeBody(body)))

        return handle

    def _look(self, http: Request) -> None:
        """Note a request that came although the worker had said that it leaves."""
        machine, process = self._machine, PROCESS.get()
        worker = process and machine.workers.get(process.pid)
        since_s = worker.draining_since_s if worker else 0.0
        wire = cast(Any, http.connection).transport
        sender = wire.peer.process if wire and wire.peer else None
        woken_s = sender.thawed_s if sender else 0.0
        now_s = machine.loop.time()
        if since_s and now_s - max(since_s, woken_s) > HEARD_WITHIN_S:
            machine.wrong.append(f"{now_s:.1f}: {worker.process.name} drains, and gets a request")
