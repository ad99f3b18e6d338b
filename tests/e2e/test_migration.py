"""kill -9 of a decode worker in the middle of its streams: they go on at another, with the text unchanged."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Any

import aiohttp
import pytest

from tests.e2e.deployment import MODEL, Deployment
from tests.e2e.traces import in_torture
from tests.fakes.polling import eventually

KILLS = int(os.environ.get("DYNAPLAN_KILLS", "20"))
STREAMS = 40
TOKENS = 150
OPTIONS = (
    *("--VllmWorker.ServiceArgs.workers=2", "--VllmWorker.startup-time=0.1", "--gpus", "2"),
    "--Planner.no-operation=true",
)


class Stream:
    """One streamed answer: its text, and its other parts as a client sees them."""

    def __init__(self) -> None:
        self.text = ""
        self.ids: set[str] = set()
        self.roles = 0
        self.usage: dict[str, Any] = {}
        self.finish_reason = ""
        self.is_done = False
        self.error: Any = None

    async def take(self, session: aiohttp.ClientSession, url: str, number: int, path: str) -> Stream:
        prompt: dict[str, Any] = {"prompt": f"Story {number}: once upon"}
        if "chat" in path:
            prompt = {"messages": [{"role": "user", "content": f"Tell me story {number}"}]}
        body = {"model": MODEL, "stream": True, "max_tokens": TOKENS, "ignore_eos": True, **prompt}
        body["stream_options"] = {"include_usage": True}
        try:
            async with session.post(url + path, json=body) as response:
                async for line in response.content:
                    self._line(line.decode().strip())
        except aiohttp.ClientError as error:
            self.error = self.error or repr(error)
        return self

    def _line(self, line: str) -> None:
        if line == "data: [DONE]":
            self.is_done = True
        elif line.startswith("data: "):
            document = json.loads(line[6:])
            self.error = document.get("error")
            self.ids.add(document.get("id", ""))
            self.usage = document.get("usage") or self.usage
            for choice in document.get("choices", ()):
                delta = choice.get("delta", {})
                self.roles += "role" in delta
                self.text += choice.get("text") or delta.get("content") or ""
                self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def seen(self) -> tuple[Any, ...]:
        """All that must not depend on the worker. The prompt's tokens may: one may span the seam."""
        tokens = self.usage.get("completion_tokens")
        return self.text, len(self.ids), self.roles, tokens, self.finish_reason, self.is_done, self.error


async def streams_of(url: str, path: str, begun: Callable[[], Any] = lambda: None) -> list[Any]:
    streams = [Stream() for _ in range(STREAMS)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        tasks = [
            asyncio.create_task(stream.take(session, url, number, path))
            for number, stream in enumerate(streams)
        ]
        await eventually(lambda: all(len(each.text) > 20 or each.error for each in streams), 60)
        begun()
        await asyncio.gather(*tasks)
    return [stream.seen() for stream in streams]


@in_torture
@pytest.mark.timeout(120 + 60 * KILLS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_killed_worker_cuts_no_stream_and_changes_no_text(
    deploy: Callable[..., Deployment], path: str
) -> None:
    deployment = await asyncio.to_thread(deploy, "graphs.agg:Frontend", "agg.yaml", *OPTIONS)
    uncut = await streams_of(deployment.url, path)
    for number in range(KILLS):
        victim = deployment.pid_of(sorted(deployment.workers("VllmWorker"))[number % 2])
        cut = await streams_of(deployment.url, path, partial(os.kill, victim, signal.SIGKILL))
        changed = [pair for pair in zip(cut, uncut, strict=True) if pair[0] != pair[1]]
        assert len(changed) == 0, f"round {number}:\n" + "\n".join(
            f"{one}\n{other}" for one, other in changed[:3]
        )
        await eventually(partial(is_back, deployment, victim), 90)
    moved = await asyncio.to_thread(migrations, deployment)
    print(f"{KILLS} kills, {moved:.0f} streams have gone on at the other worker")
    assert moved > KILLS * STREAMS / 4  # on a busy machine some end before the kill


def migrations(deployment: Deployment) -> float:
    with urllib.request.urlopen(f"{deployment.url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    name = "dynamo_frontend_model_migration_total{"
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def is_back(deployment: Deployment, dead: int) -> bool:
    """All are ready, none as the process that was killed: on a busy machine a death is noticed late.

    A worker that has died more than five times in a minute is tried again at once.
    """
    workers = deployment.workers("VllmWorker").values()
    if "failed" in {each["state"] for each in workers}:
        deployment.scale(decode=2)
    return all(each["state"] == "ready" and each["pid"] != dead for each in workers)


def has_grown(stream: Stream, length: int) -> bool:
    return len(stream.text) > length + 20


async def the_busy_worker(session: aiohttp.ClientSession, deployment: Deployment) -> int:
    """The pid of the worker that computes an answer, once there is one."""
    while True:
        for each in deployment.workers("VllmWorker").values():
            try:
                async with session.get(f"{each['url']}/load_metrics") as response:
                    if (await response.json())["worker_stats"]["request_active_slots"]:
                        return int(each["pid"])
            except aiohttp.ClientError:
                continue
        await asyncio.sleep(0.001)
