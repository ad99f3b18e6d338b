"""Every store against a model of one: calls at random, of which each answer and each watch is checked.

The store that is compared with is a dictionary, ``Model``. The calls of a quiet run are all there are; those
of a disturbed run can be repeated without harm, since nobody knows whether one that failed was carried out.
Servers are killed, stopped and frozen meanwhile; the file store has none, so there it is another process that
writes. The seed is printed. The long version runs in ``tox -e torture``.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest

from dynaplan.process.guard import guard_command
from dynaplan.store.etcd import EtcdStore
from dynaplan.store.file_store import FileStore
from dynaplan.store.model import KeyValue, Transaction
from dynaplan.store.nats_store import NatsStore
from dynaplan.store.port import Store
from dynaplan.util.errors import PermanentError, StoreUnavailable
from tests.contract.stores import (
    BACKENDS,
    EVERY_CHANGE,
    FRESH_LEASES,
    LACKS,
    ONE_REVISION,
    OTHER_CLIENTS,
    Watched,
)
from tests.fakes.polling import eventually, lasting
from tests.fakes.processes import freeze
from tests.fakes.servers import Server, start_etcd, start_nats

IS_TORTURE = bool(os.environ.get("DYNAPLAN_TORTURE"))
CALLS = 5_000 if IS_TORTURE else 250
CHANGES = 10_000 if IS_TORTURE else 200
CHECKED_EVERY = 500 if IS_TORTURE else 100
TTL_S = 600
# Shorter than a call waits: else a write that was given up could be carried out after a later one.
LONGEST_FREEZE_S = 1.0

KEYS = ("watched/a", "watched/b", "watched/c/d", "watched/c", "else/a", "else/ж", "z")


class Model:
    """What a store has after the calls that were made, and the values that a watch of all must have seen."""

    def __init__(self) -> None:
        self.items: dict[str, tuple[str, int]] = {}
        self.revisions: dict[str, int] = {}
        self.leases: list[int] = []
        self.written: list[tuple[str, str]] = []

    def write(self, puts: dict[str, str], deletes: tuple[str, ...] = (), lease: int = 0) -> None:
        for key, value in puts.items():
            self.items[key] = value, lease
            self.written.append((key, value))
        for key in deletes:
            self.items.pop(key, None)

    def end(self, lease: int) -> None:
        self.leases.remove(lease)
        self.items = {key: held for key, held in self.items.items() if held[1] != lease}

    def under(self, prefix: str) -> dict[str, str]:
        return {key: value for key, (value, _) in self.items.items() if key.startswith(prefix)}


class Walk:
    """Calls one method after another, chosen at random, by one client after another."""

    def __init__(self, clients: list[Store], choice: random.Random, lacks: frozenset[str]) -> None:
        self.model = Model()
        self._clients = clients
        self._choice = choice
        self._lacks = lacks
        self._values = iter(range(10**9))
        self._steps: list[Callable[[Store], Coroutine[Any, Any, None]]] = [
            self._put,
            self._put,
            self._delete,
            self._commit,
            self._commit,
            self._commit_in_vain,
            self._grant,
            self._revoke,
            self._keep_alive,
            self._write_under_an_ended_lease,
        ]

    async def step(self) -> None:
        await self._choice.choice(self._steps)(self._client())
        await self._compare()

    def _client(self) -> Store:
        return self._choice.choice(self._clients)

    def _key(self) -> str:
        return self._choice.choice(KEYS)

    def _value(self) -> str:
        number = next(self._values)
        return f"{number} ✓" if number else ""  # each is written once, and an empty value is one

    def _lease(self) -> int:
        return self._choice.choice([0, *self.model.leases])

    async def _put(self, store: Store) -> None:
        key, value, lease = self._key(), self._value(), self._lease()
        await store.put(key, value, lease)
        self.model.write({key: value}, (), lease)
        (item,) = (item for item in await store.list(key) if item.key == key)
        assert item.revision > self.model.revisions.get(key, 0)

    async def _delete(self, store: Store) -> None:
        key = self._key()
        await store.delete(key)
        self.model.write({}, (key,))

    async def _commit(self, store: Store) -> None:
        expected, puts, deletes = await self._drawn()
        lease = self._lease()
        assert await store.commit(Transaction(expected, puts, deletes, lease))
        self.model.write(puts, deletes, lease)
        items = [item for item in await self._client().list("") if item.key in puts]
        assert ONE_REVISION in self._lacks or len({item.revision for item in items}) <= 1

    async def _commit_in_vain(self, store: Store) -> None:
        expected, puts, deletes = await self._drawn()
        key = self._key()
        item = await store.get(key)
        wrong = (0, item.revision - 1) if item else (10**6,)
        assert not await store.commit(
            Transaction(expected | {key: self._choice.choice(wrong)}, puts, deletes, self._lease())
        )

    async def _drawn(self) -> tuple[dict[str, int], dict[str, str], tuple[str, ...]]:
        """What a transaction may rightly expect, and what it writes and deletes; each may be empty."""
        present = {item.key: item.revision for item in await self._client().list("")}
        keys = self._choice.sample(KEYS, len(KEYS))
        count = self._choice.randint(1, 3)
        puts = {key: self._value() for key in keys[:count]}
        deletes = tuple(keys[count : count + self._choice.randint(0, 2)])
        guarded_keys = self._choice.sample(KEYS, self._choice.randint(0, 3))
        return {key: present.get(key, 0) for key in guarded_keys}, puts, deletes

    async def _grant(self, store: Store) -> None:
        if len(self.model.leases) < 4:
            lease = await store.grant(TTL_S)
            assert 0 < lease < 2**63
            assert lease not in self.model.leases
            self.model.leases.append(lease)

    async def _revoke(self, store: Store) -> None:
        if self.model.leases and self._choice.random() < 0.5:
            lease = self._choice.choice(self.model.leases)
            await store.revoke(lease)
            self.model.end(lease)
            client = self._client()
            if FRESH_LEASES in self._lacks:
                await eventually(lambda: _has_ended(client, lease))
            assert await client.keep_alive(lease) == 0.0
            await self._client().revoke(lease)

    async def _keep_alive(self, store: Store) -> None:
        for lease in self.model.leases:
            assert await store.keep_alive(lease) == TTL_S
        assert await store.keep_alive(12345) == 0.0

    async def _write_under_an_ended_lease(self, store: Store) -> None:
        lease = await store.grant(TTL_S)
        await store.revoke(lease)
        with pytest.raises(PermanentError):
            await self._client().commit(Transaction(puts={self._key(): "refused"}, lease=lease))
        with pytest.raises(PermanentError):
            await self._client().put(self._key(), "refused", lease)

    async def _compare(self) -> None:
        items = await self._client().list("")
        items = tuple(item for item in items if item.key in KEYS)
        assert {item.key: (item.value, item.lease) for item in items} == self.model.items
        assert [item.key for item in items] == sorted(self.model.items)
        key = self._key()
        assert await self._client().get(key) == next((item for item in items if item.key == key), None)
        prefix = self._choice.choice(("watched/", "watched/c", "else/ж", "absent"))
        listed = await self._client().list(prefix)
        assert {item.key: item.value for item in listed if item.key in KEYS} == self.model.under(prefix)
        assert [item.key for item in listed] == sorted(item.key for item in listed)
        self._revisions_rise(items)

    def _revisions_rise(self, items: tuple[KeyValue, ...]) -> None:
        """Each key's revision rises, also over its deletion."""
        for item in items:
            assert item.revision >= self.model.revisions.get(item.key, 1)
            self.model.revisions[item.key] = item.revision


async def _has_ended(store: Store, lease: int) -> bool:
    return not await store.keep_alive(lease)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.timeout(3600 if IS_TORTURE else 120)
async def test_every_answer_and_every_watch_is_that_of_the_model(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    connect = await BACKENDS[backend](request, tmp_path)
    lacks = LACKS.get(backend, frozenset())
    clients = [connect(), connect()]
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    choice = random.Random(seed)
    walk = Walk(clients[: 1 if OTHER_CLIENTS in lacks else 2], choice, lacks)
    identity = await clients[0].identity()
    watches = [("", await Watched(clients[0], "").started())]
    for number in range(CALLS):
        if number in (CALLS // 3, CALLS // 2):
            prefix = "watched/c" if number == CALLS // 2 else "watched/"
            watches.append((prefix, Watched(choice.choice(clients), prefix)))
        await walk.step()
    for prefix, watched in watches:
        await watched.reaches_among(KEYS, walk.model.under(prefix))
        assert watched.snapshots == 1
    for key in KEYS:
        # What a transaction writes is one change, whose keys have no order.
        seen = [value for each, value in watches[0][1].key_puts if each == key]
        written = [value for each, value in walk.model.written if each == key]
        assert seen == written or (
            EVERY_CHANGE in lacks and seen == [each for each in written if each in seen]
        )
    for _, watched in watches:
        await watched.stop()
    assert {await client.identity() for client in clients} == {identity}
    for client in clients:
        await client.close()


# Disturbed


class Disturbed(Protocol):
    """What is killed, stopped and frozen; it runs before and after each."""

    def faults(self, choice: random.Random) -> list[Callable[[], Awaitable[None]]]:
        """Return what may happen to it."""
        ...


class DisturbedServer:
    """A store's server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def faults(self, choice: random.Random) -> list[Callable[[], Awaitable[None]]]:
        async def killed() -> None:
            self._server.kill()
            await lasting(choice.uniform(0.0, 0.2))
            await self._server.start_again()

        async def stopped() -> None:
            await asyncio.to_thread(self._server.stop)
            await self._server.start_again()

        async def frozen() -> None:
            self._server.freeze()
            await lasting(choice.uniform(0.0, LONGEST_FREEZE_S))
            self._server.thaw()

        return [killed, stopped, frozen]


class DisturbedWriter:
    """Another process of the file store, which writes ``pair/a`` and ``pair/b`` all the time, as one."""

    def __init__(self, directory: Path) -> None:
        words = [sys.executable, "-m", "tests.contract.file_store_child", "transact", str(directory)]
        self._command = guard_command([*words, "pair/a", "pair/b"], os.getpid())
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> DisturbedWriter:
        self._process = await asyncio.to_thread(self._started)
        return self

    def _started(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(self._command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.communicate()

    def faults(self, choice: random.Random) -> list[Callable[[], Awaitable[None]]]:
        async def killed() -> None:
            self.kill()
            await self.start()

        async def frozen() -> None:
            assert self._process is not None
            freeze(self._process.pid)
            await lasting(choice.uniform(0.0, LONGEST_FREEZE_S))
            self._process.send_signal(signal.SIGCONT)

        return [killed, killed, frozen]


class Disturbance:
    """Faults at random, until told to end; at least one of each kind."""

    def __init__(self, disturbed: Disturbed, choice: random.Random) -> None:
        self._faults = disturbed.faults(choice)
        self._choice = choice
        self._ending = asyncio.Event()

    async def run(self) -> None:
        self._choice.shuffle(self._faults)
        count = 0
        while not (self._ending.is_set() and count >= len(self._faults)):
            await lasting(self._choice.uniform(0.0, 0.3))
            await self._faults[count % len(self._faults)]()
            count += 1

    def end(self) -> None:
        """Let the present fault be the last."""
        self._ending.set()


class Writer:
    """Changes keys at random, each until it is acknowledged; ``state`` is what the store has by then."""

    def __init__(self, store: Store, choice: random.Random) -> None:
        self.state: dict[str, str] = {}
        self._store = store
        self._choice = choice

    async def write(self, count: int) -> None:
        for _ in range(count):
            key = f"watched/{self._choice.randrange(20)}"
            if self._choice.random() < 0.2:
                await self._until_answered(lambda: self._store.delete(key))  # noqa: B023
                self.state.pop(key, None)
            else:
                value = f"{self._choice.random()}"
                await self._until_answered(lambda: self._store.put(key, value))  # noqa: B023
                self.state[key] = value

    async def _until_answered(self, call: Callable[[], Awaitable[None]]) -> None:
        async def is_answered() -> bool:
            try:
                await call()
            except StoreUnavailable:
                return False
            return True

        await eventually(is_answered)


@pytest.fixture(params=["etcd", "nats", "file"])
async def disturbed(
    request: pytest.FixtureRequest, runtime_dir: Path
) -> AsyncIterator[tuple[Disturbed, Store, Store]]:
    """What is disturbed, the store of who writes, and the store of who watches."""
    kinds: dict[str, Callable[[dict[str, str]], Store]] = {
        "etcd": EtcdStore.from_environment,
        "nats": NatsStore.from_environment,
        "file": FileStore.from_environment,
    }
    with ExitStack() as stack:
        if request.param == "file":
            environment = {"DYN_FILE_KV": str(runtime_dir / "kv")}
            writer = await DisturbedWriter(runtime_dir / "kv").start()
            stack.callback(writer.kill)
            subject: Disturbed = writer
        else:
            server = (start_etcd if request.param == "etcd" else start_nats)(runtime_dir)
            stack.callback(server.kill)
            environment, subject = server.environment, DisturbedServer(server)
        written, watched = (kinds[request.param](environment) for _ in range(2))
        yield subject, written, watched
        await written.close()
        await watched.close()


@pytest.mark.timeout(3600 if IS_TORTURE else 120)
# nats-py leaves an attempt to connect that a frozen server does not answer to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_watch_sees_every_final_state_while_servers_and_writers_come_and_go(
    disturbed: tuple[Disturbed, Store, Store],
) -> None:
    subject, written, watching = disturbed
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    choice = random.Random(seed)
    watched = await Watched(watching, "watched/").started()
    writer = Writer(written, choice)
    for _ in range(CHANGES // CHECKED_EVERY):
        disturbance = Disturbance(subject, choice)
        disturbing = asyncio.create_task(disturbance.run())
        await writer.write(CHECKED_EVERY)
        disturbance.end()
        await disturbing
        await watched.reaches(writer.state)
        kept = {item.key: item.value for item in await written.list("watched/")}
        assert kept == writer.state
        # All of a transaction is there or nothing, wherever its writer was killed.
        assert len({item.value for item in await written.list("pair/")}) <= 1
    await watched.stop()
