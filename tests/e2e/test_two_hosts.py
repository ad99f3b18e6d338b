"""Components on two hosts, which are network namespaces: store and frontend on one, a worker on the other.

Skipped where such hosts cannot be made.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from dynaplan.http.tls import client_tls
from tests.e2e.traces import in_torture
from tests.fakes.certificates import Authority
from tests.fakes.components import RunningComponent
from tests.fakes.hosts import Host, StartOn
from tests.fakes.load import Outcome, stream_one
from tests.fakes.polling import eventually

pytestmark = in_torture

PROMPT = "Tell me about the lights of the city, and about its rivers. " * 20
PREFILLS = "dynamo_frontend_prefills_total"


async def test_over_tls_a_worker_serves_another_host_is_cut_off_comes_back_and_drains(
    hosts: tuple[Host, Host], start_on: StartOn, tmp_path: Path
) -> None:
    here, there = hosts
    authority = Authority(tmp_path / "certificates")
    for host in hosts:
        authority.issue(host.name, f"subjectAltName=IP:{host.address}")

    def tls(host: Host) -> tuple[str, ...]:
        own = f"{authority.directory}/{host.name}"
        trust = ("--tls-ca", str(authority.certificate))
        return (
            "--advertise-host",
            host.address,
            "--tls-cert",
            f"{own}.pem",
            "--tls-key",
            f"{own}.key",
            *trust,
        )

    frontend = start_on(
        here, "frontend", "--port", "0", "--host", here.address, "--router-mode", "kv", *tls(here)
    )
    worker = start_on(
        there, "worker", "--model", "sim", "--speedup-ratio", "0.5", "--router", "kv", *tls(there)
    )
    on_loopback = start_on(there, "worker", "--model", "sim")
    await asyncio.gather(*(each.ready() for each in (frontend, worker, on_loopback)))
    url, trusted = frontend.public_url, client_tls(str(authority.certificate))
    await eventually(lambda: "--advertise-host changes that" in frontend.text)

    async def answered(tokens: int = 20) -> Outcome:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusted)) as client:
            return await stream_one(client, url, "sim", PROMPT, tokens)

    async def scraped(address: str, name: str) -> float:
        async def read() -> str:
            connector = aiohttp.TCPConnector(ssl=trusted)
            async with aiohttp.ClientSession(connector=connector) as client, client.get(address) as response:
                return await response.text()

        return samples(await here.run(read), name)

    assert (await here.run(answered)).is_complete
    # Its events have come over the NATS server that both can reach.
    await eventually(lambda: scraped(f"{own_url(frontend)}/metrics", "dynaplan:kv_index_blocks"))
    assert worker.pid in pids(here, frontend)

    there.plug(is_in=False)
    await eventually(lambda: worker.pid not in pids(here, frontend), interval_s=0.5)
    there.plug(is_in=True)
    await eventually(lambda: worker.pid in pids(here, frontend), interval_s=0.5)
    assert (await here.run(answered)).is_complete

    last = asyncio.create_task(here.run(lambda: answered(100)))
    await eventually(lambda: scraped(f"{url}/metrics", "dynamo_frontend_inflight_requests"))
    worker.interrupt()
    assert (await last).is_complete
    assert await worker.exit_code() == 0
    frontend.interrupt()
    assert await frontend.exit_code() == 0


@pytest.mark.parametrize("store", ["etcd", "nats"])
async def test_a_prompt_is_computed_where_it_is_decoded_when_its_kv_entries_cannot_travel(
    hosts: tuple[Host, Host], start_on: StartOn, store: str
) -> None:
    here, there = hosts
    without = "ETCD_ENDPOINTS" if store == "nats" else ""
    worker = ("worker", "--store", store, "--model", "sim", "--kv-network")  # which the engine cannot do

    def reached(host: Host) -> tuple[str, ...]:
        return ("--advertise-host", host.address)

    prefill = start_on(there, *worker, "--role", "prefill", *reached(there), without=without)
    decode = start_on(here, *worker, *reached(here), without=without)
    ways = ("--port", "0", "--remote-prefill", "--router-mode", "least-loaded", *reached(here))
    frontend = start_on(here, "frontend", "--store", store, *ways, without=without)
    await asyncio.gather(*(each.ready() for each in (prefill, decode, frontend)))

    async def answered() -> Outcome:
        async with aiohttp.ClientSession() as client:
            return await stream_one(client, frontend.public_url, "sim", PROMPT, 20)

    async def metrics() -> str:
        address = f"{frontend.public_url}/metrics"
        async with aiohttp.ClientSession() as client, client.get(address) as response:
            return await response.text()

    assert (await here.run(answered)).is_complete
    text = await here.run(metrics)
    local = "\n".join(each for each in text.splitlines() if 'place="local"' in each)
    assert samples(text, PREFILLS) == samples(local, PREFILLS) == 1
    told = status(here, frontend, "--store", store)
    assert str(decode.pid) in told
    assert "computes prompts itself" in told


def status(host: Host, beside: RunningComponent, *options: str) -> str:
    """What ``dynaplan status`` says there, with the environment of that component."""
    command = [*host.prefix, str(Path(sys.executable).with_name("dynaplan")), "status", "box", *options]
    return subprocess.run(
        command, env=beside.environment, capture_output=True, text=True, timeout=60, check=False
    ).stdout


def pids(host: Host, beside: RunningComponent) -> set[int]:
    """The pids of the components that ``dynaplan status`` shows there."""
    text = status(host, beside, "--json")
    return {each["pid"] for each in json.loads(text)["workers"]} if text else set()


def samples(text: str, name: str) -> float:
    """The sum of a metric's samples."""
    return sum(float(each) for each in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M))


def own_url(component: RunningComponent) -> str:
    return component.text.partition(" reports its health at ")[2].split()[0]
