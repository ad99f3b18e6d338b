"""KV entries that move by NIXL between vLLM engines on two hosts, which are network namespaces."""

from __future__ import annotations

import re
from pathlib import Path

import aiohttp

from tests.fakes.components import RunningComponent
from tests.fakes.hosts import Host, StartOn
from tests.fakes.polling import eventually
from tests.vllm.conftest import ON_CPU, START_UP_S
from tests.vllm.test_components import ENGINE

PATIENT = {**ON_CPU, "ETCD_LEASE_TTL": "30"}
"""No registration lapses while engines start on all cores."""


async def test_a_decode_worker_takes_over_what_a_prefill_worker_of_another_host_has_computed(
    hosts: tuple[Host, Host], start_on: StartOn, tiny_hf: Path, vllm_python: Path
) -> None:
    here, there = hosts
    model = ("--model", str(tiny_hf), "--served-model-name", "tiny", *ENGINE)

    def worker(host: Host, *options: str) -> RunningComponent:
        reached = ("--advertise-host", host.address, "--kv-network")
        words = ("worker", "--engine", "vllm", *model, *reached, *options)
        return start_on(host, *words, program=str(vllm_python.with_name("dynaplan")), **PATIENT)

    # One after the other: an engine takes a minute of both cores to start.
    prefill = await worker(there, "--role", "prefill").ready(START_UP_S)
    decode = await worker(here, "--role", "decode", "--remote-prefill").ready(START_UP_S)
    ways = ("--remote-prefill", "--router-mode", "least-loaded", "--advertise-host", here.address)
    frontend = await start_on(here, "frontend", "--port", "0", *ways, **PATIENT).ready()

    async def asked() -> tuple[int, dict[str, float]]:
        message = {"role": "user", "content": "Tell me about the lights of the city. " * 8}
        body = {"model": "tiny", "messages": [message], "max_tokens": 12, "ignore_eos": True}
        async with aiohttp.ClientSession() as client:
            url = frontend.public_url
            async with client.post(f"{url}/v1/chat/completions", json=body) as response:
                tokens = (await response.json())["usage"]["completion_tokens"]
            async with client.get(f"{url}/metrics") as response:
                text = await response.text()
        found = re.findall(r'^dynamo_frontend_prefills_total{.*place="(\w+)".*} (\S+)$', text, re.M)
        return tokens, {place: float(count) for place, count in found}

    async def is_remote() -> bool:
        tokens, places = await here.run(asked)
        assert tokens == 12
        return "remote" in places

    # The frontend computes prompts where they are decoded until it has opened the queue.
    await eventually(is_remote, interval_s=0.5)
    for each in (frontend, decode, prefill):
        each.interrupt()
        assert await each.exit_code() == 0, each.text
