"""A request that kills every worker that takes it costs a few workers and no innocent request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

from dynaplan.contract.store_keys import fleet_key
from tests.fakes.frontend_runtime import Stage, stage
from tests.fakes.openai_worker import MODEL, FakeWorker
from tests.fakes.polling import eventually

COMPLETIONS = "/v1/completions"
POISON = {"grammar_lazy": True, "grammar_triggers": [{"type": 99, "value": "x"}]}


class MortalWorker(FakeWorker):
    """Dies of a poisoned body, as llama.cpp aborts: every connection breaks off, and nothing listens."""

    def __init__(self, name: str) -> None:
        super().__init__(name, tokens=20)
        self.transports: set[asyncio.Transport] = set()
        self.dead = False
        self.dying: asyncio.Task[None] | None = None

    async def _act(self, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        assert request.transport
        if self.dead:  # a connection that was made in the moment of its death
            request.transport.abort()
            return web.Response()
        self.transports.add(request.transport)
        if "grammar_triggers" in body:
            self.dead = True
            self.dying = asyncio.create_task(self._die())
            await asyncio.shield(self.dying)  # a client that leaves does not stop it
            return web.Response()
        return await super()._act(request, body)

    async def _die(self) -> None:
        await self._stop_listening()
        for transport in self.transports:
            transport.abort()

    async def _stop_listening(self) -> None:
        """Close the listening sockets; asyncio leaks a connection that it accepts in the same moment."""
        assert self._runner
        loop = asyncio.get_running_loop()
        for site in list(self._runner.sites):
            server = site._server
            for listening in server.sockets if isinstance(server, asyncio.Server) else ():
                loop.remove_reader(listening.fileno())
            for _ in range(3):  # accepted connections get their handlers
                await asyncio.sleep(0)
            await site.stop()


class Hospital:
    """Replaces workers that have died, as the fleet plugin does, under a new registration."""

    def __init__(self, here: Stage, workers: int, kind: Callable[[str], MortalWorker] = MortalWorker) -> None:
        self._here = here
        self._kind = kind
        self._wanted = workers
        self.workers: list[MortalWorker] = []
        self._keys: dict[MortalWorker, str] = {}

    @property
    def deaths(self) -> int:
        return sum(worker.dead for worker in self.workers)

    async def keep(self) -> None:
        fleet = {"roles": {"decode": {"ready": self._wanted, "starting": 1}}}
        await self._here.store.put(fleet_key("ns"), json.dumps(fleet))
        while True:
            for worker, key in self._keys.copy().items():
                if worker.dead:
                    await self._here.store.delete(self._keys.pop(worker, key))
            while len(self.workers) - self.deaths < self._wanted:
                worker = self._kind(f"ns_VllmWorker_{len(self.workers)}")
                self._here.workers.append(worker)  # which stops it, even if it has not started
                await worker.start()
                self.workers.append(worker)
                instance = await worker.register(self._here.store, len(self.workers))
                self._keys[worker] = instance.key
                await self._here.know(instance)
            await asyncio.sleep(0.01)


async def poisoned(here: Stage, text: str) -> tuple[int, str]:
    return await here.post(COMPLETIONS, prompt=text, max_tokens=8, **POISON)


async def test_a_poisoned_request_ends_in_500_with_the_reason_and_is_then_refused_without_a_death() -> None:
    async with stage(served_model_name=MODEL) as here:
        hospital = Hospital(here, 3)
        here.runtime.spawn(hospital.keep(), "hospital")
        await eventually(lambda: len(hospital.workers) == 3)
        for _ in range(30):
            status, text = await poisoned(here, "hi")
            assert (status, json.loads(text)["error"]["code"]) == (500, "request_kills_workers")
        assert hospital.deaths == 2
        assert (await here.post(COMPLETIONS, prompt="hi", max_tokens=8))[0] == 200


async def test_innocent_requests_beside_a_poisoned_one_are_all_answered() -> None:
    """Eight clients ask all the time; none is a stream, so that each is begun anew."""
    answers: list[int] = []

    async with stage(served_model_name=MODEL) as here:
        hospital = Hospital(here, 3)
        here.runtime.spawn(hospital.keep(), "hospital")
        await eventually(lambda: len(hospital.workers) == 3)

        async def ask(client: int) -> None:
            for number in range(25):
                status, _ = await here.post(COMPLETIONS, prompt=f"{client} {number}", max_tokens=8)
                answers.append(status)

        async def attack() -> None:
            for _ in range(25):
                assert (await poisoned(here, "hi"))[0] in (500, 502)

        await asyncio.gather(attack(), *map(ask, range(8)))
        assert 2 <= hospital.deaths <= 6
    assert answers == [200] * 200
