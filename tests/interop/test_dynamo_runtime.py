"""The runtime of today's Dynamo counts our workers, and we name its workers without calling them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dynaplan.contract.counts import PoolSizes
from dynaplan.fleet.unreadable import prefixes, uncallable, unreadable
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.model import Decision
from dynaplan.planner.virtual.connector import VirtualConnector
from dynaplan.runtime import VirtualConnectorClient
from dynaplan.store.discovery import Discovery
from dynaplan.store.etcd import EtcdStore
from dynaplan.store.instances import Instance
from dynaplan.store.registration import Registration
from dynaplan.util.clock import SystemClock
from tests.contract.runtimes import runtime_of
from tests.fakes.polling import eventually
from tests.fakes.registrations import FakeRegistrations
from tests.fakes.servers import Server

CARD = {"model": "meta-llama/Llama-3.1-8B", "context_tokens": 4096, "kv_block_tokens": 16}
WITHIN_S = 60.0


@pytest.fixture
async def endpoint(etcd: Server) -> AsyncIterator[str]:
    """The etcd at a TCP port: Dynamo's client knows no unix sockets."""
    path = etcd.environment["ETCD_ENDPOINTS"].removeprefix("unix://")

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_unix_connection(path)
        await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer), return_exceptions=True)

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


@pytest.fixture
async def store(etcd: Server) -> AsyncIterator[EtcdStore]:
    store = EtcdStore.from_environment(etcd.environment)
    yield store
    await store.close()


def started(python: str, endpoint: str, *arguments: str) -> subprocess.Popen[str]:
    command = [python, str(Path(__file__).with_name("dynamo_runtime.py")), *arguments]
    environment = os.environ | {"ETCD_ENDPOINTS": endpoint, "DYN_LOG": "error"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


async def answer(python: str, endpoint: str, *arguments: str) -> Any:
    process = started(python, endpoint, *arguments)
    out, _ = await asyncio.to_thread(process.communicate, timeout=WITHIN_S)
    return json.loads(out.splitlines()[-1])


async def test_it_counts_our_workers_and_refuses_to_call_them(
    python: str, endpoint: str, store: EtcdStore
) -> None:
    discovery = Discovery(store, "ns")
    await discovery.start()

    def instances(lease: int) -> list[Instance]:
        return [Instance("ns", "VllmWorker", "generate", lease, "http://127.0.0.1:4000", card=CARD)]

    registration = Registration(store, SystemClock(), discovery, instances, role=Role.DECODE)
    await registration.start()
    for component in ("backend", "VllmWorker"):
        seen = await answer(python, endpoint, "list", f"ns.{component}.generate")
        assert seen["ids"] == [registration.instance_id]
        assert seen["instances"] == [[registration.instance_id, "tcp", "http://127.0.0.1:4000"]]
        assert "Invalid TCP address 'http://127.0.0.1:4000'" in seen["called"]
    (item,) = await store.list("v1/mdc/ns/")
    card = await answer(python, endpoint, "card", json.dumps(json.loads(item.value)["card_json"]))
    assert (card["display_name"], card["context_length"], card["kv_cache_block_size"]) == (
        CARD["model"],
        4096,
        16,
    )
    await registration.deregister()
    assert await store.list("v1/") == ()
    await discovery.close()


async def test_its_workers_are_named_and_not_callable(python: str, endpoint: str, store: EtcdStore) -> None:
    process = await asyncio.to_thread(started, python, endpoint, "serve", "ns.backend.generate")

    async def found() -> dict[str, str]:
        items = [item for prefix in prefixes("ns") for item in await store.list(prefix)]
        assert unreadable("ns", items) == {}
        return uncallable(items)

    try:
        ((key, reached),) = (await eventually(found, WITHIN_S)).items()
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)
    assert key.startswith("v1/instances/ns/backend/generate/")
    assert reached.startswith("tcp ")


async def test_its_client_carries_our_planners_decisions_out_also_when_both_were_started_anew(
    python: str, endpoint: str, store: EtcdStore
) -> None:
    before = PoolSizes(0, 0)
    for wanted in (PoolSizes(2, 3), PoolSizes(2, 4)):
        connector = VirtualConnector(store, "ns", FakeRegistrations())
        number = await connector.apply(Decision(before, wanted, ()))
        process = await asyncio.to_thread(started, python, endpoint, "carry", "ns")
        try:
            assert process.stdout
            told = json.loads(await asyncio.to_thread(process.stdout.readline))
            assert told == [wanted.prefill, wanted.decode, number]
            assert not (await connector.desired()).is_pending
        finally:
            process.kill()
            await asyncio.to_thread(process.communicate)
        before = wanted


async def test_our_client_carries_its_planners_decisions_out_also_after_that_one_began_again(
    python: str, endpoint: str, store: EtcdStore
) -> None:
    client = VirtualConnectorClient(runtime_of(store))
    for decode in (3, 5):  # the second coordinator begins with decision 0 again
        coordinator = await asyncio.to_thread(coordinating, python, endpoint)
        try:
            for wanted in (decode, decode + 1):
                async with asyncio.timeout(WITHIN_S):
                    await decided(coordinator, 1, wanted)
                    await client.wait()
                    decision = await client.get()
                    assert (decision.num_prefill_workers, decision.num_decode_workers) == (1, wanted)
                    await client.complete(decision)
        finally:
            coordinator.kill()
            await asyncio.to_thread(coordinator.communicate)


def coordinating(python: str, endpoint: str, namespace: str = "ns") -> subprocess.Popen[str]:
    command = [python, str(Path(__file__).with_name("dynamo_runtime.py")), "decide", namespace]
    environment = os.environ | {"ETCD_ENDPOINTS": endpoint, "DYN_LOG": "error"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)


async def decided(coordinator: subprocess.Popen[str], prefill: int, decode: int) -> None:
    """Have the coordinator decide that; it leaves out what is asked before it has seen the last one's end."""

    async def is_decided() -> bool:
        assert coordinator.stdin and coordinator.stdout
        coordinator.stdin.write(f"{prefill} {decode}\n")
        coordinator.stdin.flush()
        state = json.loads(await asyncio.to_thread(coordinator.stdout.readline))
        return bool(state[:2] == [prefill, decode])

    await eventually(is_decided, WITHIN_S, interval_s=0.1)
