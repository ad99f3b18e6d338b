"""Components that other hosts reach, over TLS: requests, drains, loads and traffic, and what is refused."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest

from dynaplan.http.tls import client_tls
from dynaplan.planner.metrics.frontends import FrontendsTraffic
from dynaplan.planner.metrics.worker_loads import HttpWorkerLoads
from dynaplan.util.clock import SystemClock
from tests.fakes.certificates import Authority
from tests.fakes.components import TOKEN_FILE, RunningComponent
from tests.fakes.load import Outcome, stream_one
from tests.fakes.polling import eventually

Make = Callable[..., RunningComponent]


@pytest.fixture(scope="module")
def host() -> str:
    """An address of this machine that is not loopback; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory, host: str) -> Authority:
    made = Authority(tmp_path_factory.mktemp("certificates"))
    made.issue("right", f"subjectAltName=IP:{host}")
    made.issue("wrong", "subjectAltName=DNS:elsewhere.example")
    return made


@pytest.fixture
def make(tmp_path: Path, host: str, authority: Authority) -> Iterator[Make]:
    made: list[RunningComponent] = []
    token = tmp_path / TOKEN_FILE
    token.touch(mode=0o600)
    token.write_text("a-token-of-the-namespace")
    environment = {"DYN_FILE_KV": str(tmp_path / "kv"), "DYNAPLAN_TOKEN_FILE": str(token)}

    def start(
        command: str, *more: str, certificate: str = "right", ca: str = "authority"
    ) -> RunningComponent:
        files = authority.directory
        arguments = (command, "--namespace", "box", "--store", "file", "--advertise-host", host)
        tls = ("--tls-cert", f"{files}/{certificate}.pem", "--tls-key", f"{files}/{certificate}.key")
        trust = ("--tls-ca", f"{files}/{ca}.pem") if ca else ()
        made.append(RunningComponent(tmp_path, environment, *arguments, *tls, *trust, *more))
        return made[-1].spawn()

    yield start
    for each in made:
        each.kill()


async def test_requests_loads_traffic_and_drains_are_encrypted_and_verified(
    make: Make, host: str, authority: Authority, tmp_path: Path
) -> None:
    worker = make("worker", "--model", "sim", "--speedup-ratio", "0.5")
    frontend = make("frontend", "--port", "0", "--host", host)
    await asyncio.gather(worker.ready(), frontend.ready())
    url = frontend.public_url
    assert url.startswith(f"https://{host}:")
    tls = client_tls(str(authority.certificate))
    clock = SystemClock()
    traffic = FrontendsTraffic(lambda: [url], "box", clock, tls=tls)
    await traffic.pull()
    assert (await streamed(url, 20, tls)).is_complete
    await traffic.pull()
    assert (await traffic.traffic(1.0)).requests == 1
    await traffic.close()
    (worker_url,) = (each for each in urls(tmp_path) if each != own_url(frontend))
    assert worker_url.startswith(f"https://{host}:")
    trusting, distrusting = HttpWorkerLoads(tls=tls), HttpWorkerLoads()
    assert None not in await trusting.loads([worker_url])
    assert await distrusting.loads([worker_url]) == (None,)
    await trusting.close()
    await distrusting.close()
    # The worker leaves in the midst of an answer: routers are asked over TLS until they have none of it.
    slow = asyncio.create_task(streamed(url, 100, tls))
    await eventually(lambda: is_streaming(url, tls))
    worker.interrupt()
    assert (await slow).is_complete
    assert await worker.exit_code() == 0
    frontend.interrupt()
    assert await frontend.exit_code() == 0


@pytest.mark.slow
async def test_what_others_would_refuse_is_refused_at_the_start(
    make: Make, host: str, authority: Authority
) -> None:
    worker = await make("worker", "--model", "sim").ready()
    refused = {
        f"other hosts, at {host}, would refuse --tls-cert {authority.directory}/wrong.pem: "
        f"IP address mismatch": make("worker", "--model", "sim", certificate="wrong"),
        "--tls-key is given without --tls-cert": make("frontend", "--port", "0", "--tls-cert="),
        f"the certificate of {worker_name(worker)} at https://{host}:": make(
            "frontend", "--port", "0", ca=""
        ),
    }
    for sentence, component in refused.items():
        assert await component.exit_code() == 2, component.text
        assert sentence in component.text
        assert "Traceback" not in component.text


async def streamed(url: str, tokens: int, tls: ssl.SSLContext | bool) -> Outcome:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as client:
        return await stream_one(client, url, "sim", "Tell me about the lights.", tokens)


async def is_streaming(url: str, tls: ssl.SSLContext | bool) -> bool:
    connector = aiohttp.TCPConnector(ssl=tls)
    async with aiohttp.ClientSession(connector=connector) as client, client.get(f"{url}/metrics") as response:
        text = await response.text()
    return any(
        line.startswith("dynamo_frontend_inflight_requests") and not line.endswith(" 0.0")
        for line in text.splitlines()
    )


def urls(directory: Path) -> set[str]:
    """The addresses that are registered in the file store."""
    with closing(sqlite3.connect(directory / "kv" / "sqlite" / "store.db")) as sql:
        rows = sql.execute("SELECT value FROM item WHERE cast(key AS TEXT) LIKE '/services/box/%'").fetchall()
    return {json.loads(value)["transport"]["http"] for (value,) in rows}


def own_url(component: RunningComponent) -> str:
    return component.text.partition(" reports its health at ")[2].split()[0]


def worker_name(component: RunningComponent) -> str:
    return component.text.partition(" ")[0]
