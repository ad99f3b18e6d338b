"""No change is lost on the way to a watch while its server comes and goes: a checker for every store.

The long version, 10,000 changes, runs in ``tox -e torture``.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dynaplan.store.etcd import EtcdStore
from dynaplan.store.file.store import FileStore
from dynaplan.store.nats_kv.store import NatsStore
from dynaplan.store.port import Store
from dynaplan.util.errors import StoreUnavailable
from tests.contract.stores import Watched
from tests.fakes.polling import eventually, lasting
from tests.fakes.servers import Server, start_etcd, start_nats

IS_TORTURE = bool(os.environ.get("DYNAPLAN_TORTURE"))
CHANGES = 10_000 if IS_TORTURE else 200
CHECKED_EVERY = 500 if IS_TORTURE else 100
# Shorter than a call waits: else a write that was given up could be carried out after a later one.
LONGEST_FREEZE_S = 1.0


class Disturbance:
    """Kills, stops and freezes a server at random, until told to end; the server runs afterwards."""

    def __init__(self, server: Server, choice: random.Random) -> None:
        self.count = 0
        self._server = server
        self._choice = choice
        self._ending = asyncio.Event()

    async def run(self) -> None:
        """Disturb; at least one fault of each kind."""
        faults = [self._killed, self._stopped, self._frozen]
        self._choice.shuffle(faults)
        while not (self._ending.is_set() and self.count >= len(faults)):
            await lasting(self._choice.uniform(0.0, 0.3))
            await faults[self.count % len(faults)]()
            self.count += 1

    def end(self) -> None:
        """Let the present fault be the last."""
        self._ending.set()

    async def _killed(self) -> None:
        self._server.kill()
        await lasting(self._choice.uniform(0.0, 0.2))
        await self._server.start_again()

    async def _stopped(self) -> None:
        await asyncio.to_thread(self._server.stop)
        await self._server.start_again()

    async def _frozen(self) -> None:
        self._server.freeze()
        await lasting(self._choice.uniform(0.0, LONGEST_FREEZE_S))
        self._server.thaw()


class Writer:
    """Changes keys at random; ``state`` is what the store has acknowledged."""

    def __init__(self, store: Store, choice: random.Random) -> None:
        self.state: dict[str, str] = {}
        self._store = store
        self._choice = choice

    async def write(self, count: int) -> None:
        """Make so many changes, each until it is acknowledged."""
        for _ in range(count):
            key = f"watched/{self._choice.randrange(20)}"
            if self._choice.random() < 0.2:
                await self._until_answered(self._store.delete, key)
                self.state.pop(key, None)
            else:
                value = f"{self._choice.random()}"
                await self._until_answered(self._store.put, key, value)
                self.state[key] = value

    async def _until_answered(self, call, *arguments: str) -> None:  # type: ignore[no-untyped-def]
        async def is_answered() -> bool:
            try:
                await call(*arguments)
            except StoreUnavailable:
                return False
            return True

        await eventually(is_answered)


@pytest.fixture(params=["etcd", "nats", "file"])
async def pair(
    request: pytest.FixtureRequest, runtime_dir: Path
) -> AsyncIterator[tuple[Server | None, Store, Store]]:
    """A server, if the store has one, the store of who writes, and the store of who watches."""
    if request.param == "file":
        server, kind = None, FileStore
        environment = {"DYN_FILE_KV": str(runtime_dir / "kv")}
    else:
        server = (start_etcd if request.param == "etcd" else start_nats)(runtime_dir)
        kind = EtcdStore if request.param == "etcd" else NatsStore
        environment = server.environment
    written, watched = kind.from_environment(environment), kind.from_environment(environment)
    yield server, written, watched
    await written.close()
    await watched.close()
    if server:
        server.kill()


@pytest.mark.timeout(3600 if IS_TORTURE else 120)
# nats-py leaves an attempt to connect that a frozen server does not answer to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_watch_sees_every_final_state_while_the_server_comes_and_goes(
    pair: tuple[Server | None, Store, Store],
) -> None:
    server, written, watching = pair
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    choice = random.Random(seed)
    watched = await Watched(watching, "watched/").started()
    writer = Writer(written, choice)
    for _ in range(CHANGES // CHECKED_EVERY):
        disturbance = Disturbance(server, choice) if server else None
        disturbing = asyncio.create_task(disturbance.run()) if disturbance else None
        await writer.write(CHECKED_EVERY)
        if disturbance and disturbing:
            disturbance.end()
            await disturbing
        await watched.reaches(writer.state)
        kept = {item.key: item.value for item in await written.list("watched/")}
        assert kept == writer.state
    await watched.stop()
