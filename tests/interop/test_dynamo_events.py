"""The event plane of Dynamo 1.6.1 and ours hear each other over NATS."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from dynaplan.engines.kv_events import BlockChange, Cleared, KvEvent, Removed, Stored
from dynaplan.engines.timing_model.kv_blocks import chained, own_hashes
from dynaplan.events.nats_plane import NatsEventPlane
from dynaplan.events.port import EventPlane
from dynaplan.events.subjects import Subject
from dynaplan.events.wire_formats import DynamoFormat, payload_reader
from dynaplan.fleet.servers import find_etcd
from dynaplan.util.sockets import free_port
from tests.fakes.polling import eventually, wait_until
from tests.fakes.servers import Server

NAMESPACE = "interop"

TREE = """
import json, sys
from dynamo.llm import RadixTree, compute_block_hash_for_seq
tree = RadixTree()
events, tokens = json.load(sys.stdin)
for each in events:
    tree.apply_event(each["worker_id"], json.dumps(each["event"]).encode())
    scores = tree.find_matches(compute_block_hash_for_seq(tokens, 16)).scores
    print(json.dumps(sorted([worker, blocks] for (worker, _), blocks in scores.items())))
"""
"""Applies KV events to Dynamo's index, and prints after each one how many blocks each worker has."""

Start = Callable[[str], Path]


@pytest.fixture
def endpoints(tmp_path: Path) -> Iterator[str]:
    """An etcd at a TCP port: Dynamo's client knows no unix sockets."""
    ports = [free_port(), free_port()]
    client, peer = (f"http://127.0.0.1:{port}" for port in ports)
    options = {
        "data-dir": str(tmp_path / "etcd"),
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"default={peer}",
        "log-level": "error",
    }
    process = subprocess.Popen([find_etcd()[0], *(f"--{name}={value}" for name, value in options.items())])
    wait_until(lambda: is_open(ports[0]))
    yield client
    process.kill()
    process.wait()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
async def plane(nats: Server) -> AsyncIterator[EventPlane]:
    """Our event plane, with the original's subjects and forms."""
    made = await NatsEventPlane.from_environment(nats.environment, DynamoFormat(), -1)
    yield made
    await made.close()


@pytest.fixture
def start(nats: Server, endpoints: str, tmp_path: Path) -> Iterator[Start]:
    """Starts ``dynamo_events.py``; returns the file of its output. Skipped where there is no Dynamo."""
    python = os.environ.get("DYNAPLAN_DYNAMO_EVENTS_PYTHON")
    if not python:
        pytest.skip(
            "DYNAPLAN_DYNAMO_EVENTS_PYTHON names no Python with ai-dynamo-runtime (tox -e interop makes one)"
        )
    processes: list[subprocess.Popen[bytes]] = []

    def start(what: str) -> Path:
        output = tmp_path / what
        command = [python, str(Path(__file__).with_name("dynamo_events.py")), what, NAMESPACE]
        environ = {**os.environ, "ETCD_ENDPOINTS": endpoints, "DYN_LOG": "error", **nats.environment}
        with output.open("wb") as file:
            processes.append(subprocess.Popen(command, env=environ, stdout=file))
        return output

    yield start
    for process in processes:
        process.kill()
        process.wait()


async def test_we_hear_dynamos_kv_events_in_their_order(start: Start, plane: EventPlane) -> None:
    subscription = await plane.subscribe(f"{NAMESPACE}.backend.kv_cache_update")
    start("publish")
    read = payload_reader(list)
    async with asyncio.timeout(60):
        events = [await anext(subscription) for _ in range(5)]
    assert [event.subject for event in events] == [f"{NAMESPACE}.backend.kv_cache_update"] * 5
    assert [event.missed for event in events[1:]] == [0] * 4
    stored = [read(event.payload)[0]["event"] for event in events]
    first = stored[0]["event_id"]
    assert [each["event_id"] for each in stored] == list(range(first, first + 5))
    assert {len(each["data"]["stored"]["blocks"]) for each in stored} == {1}


async def test_dynamo_hears_our_events(start: Start, plane: EventPlane) -> None:
    publisher = plane.publisher(Subject(NAMESPACE, "backend", "forward-pass-metrics"), is_kept=False)
    output = start("subscribe")
    payload = b"\x81\xa7version\x01"

    async def heard() -> bool:
        await publisher.publish(payload)
        return payload.hex() in output.read_text()

    await eventually(heard, timeout_s=60, interval_s=0.1)
    assert set(output.read_text().split()) == {payload.hex()}


def test_dynamos_index_has_after_our_kv_events_what_they_say() -> None:
    python = os.environ.get("DYNAPLAN_DYNAMO_EVENTS_PYTHON")
    if not python:
        pytest.skip("DYNAPLAN_DYNAMO_EVENTS_PYTHON names no Python with ai-dynamo-runtime")
    tokens = list(range(64))
    own = tuple(own_hashes(tokens, 16))
    hashes = tuple(chained(own))
    changes: list[tuple[int, BlockChange]] = [
        (7, Stored(None, hashes[:2], own[:2])),
        (7, Stored(hashes[1], hashes[2:], own[2:])),
        (7, Removed(hashes[3:])),
        (8, Stored(None, hashes[:1], own[:1])),
        (8, Cleared()),
    ]
    events = [KvEvent(worker, number, change).document() for number, (worker, change) in enumerate(changes)]
    answer = subprocess.run(
        [python, "-c", TREE], input=json.dumps([events, tokens]), capture_output=True, text=True, check=True
    )
    counts = [json.loads(line) for line in answer.stdout.splitlines()]
    assert counts == [[[7, 2]], [[7, 4]], [[7, 3]], [[7, 3], [8, 1]], [[7, 3]]]
