"""Random kill -9, stops and scaling under steady load: nothing is lost but what a killed worker held."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dynaplan.adapters.messaging.nats import NatsMessenger
from dynaplan.domain.wire.prefill import prefill_stream
from tests.e2e.deployment import MODEL, Deployment
from tests.e2e.test_kills import is_whole
from tests.e2e.traces import IS_TORTURE, files_of, processes_of
from tests.fakes.load import Load, Outcome, stream_one
from tests.fakes.polling import eventually

LASTS_S = 300.0 if IS_TORTURE else 10.0
SEEDS = [int(seed) for seed in os.environ.get("DYNAPLAN_CHAOS_SEEDS", "1").split(",")]
GPUS = 6
MOST_KILLS_A_MINUTE = 4
"""Of one worker: after one more it counts as failed, which is right, but not what is tested here."""

WORKER = "dynaplan.worker.main"
"""The module in the command line of every worker."""

VICTIMS = {
    "decode": "--service-name VllmWorker",
    "prefill": "--service-name PrefillWorker",
    "planner": "--service-name Planner",
    "plugin": "FleetPlugin",
    "etcd": "etcd --name",
    "nats": "nats-server",
}
if os.environ.get("DYN_DISCOVERY_BACKEND", "etcd") != "etcd":
    del VICTIMS["etcd"]


@dataclass
class TimedLoad(Load):
    """A load that knows when each request was sent, and when its answer ended."""

    times_s: list[tuple[float, float]] = field(default_factory=list)

    async def _client(self, number: int) -> None:
        count = 0
        while not self._stopping:
            count += 1
            prompt = f"{number}.{count} {self.prompt}"
            sent_s = time.monotonic()
            outcome = await stream_one(self._session, self.url, self.model, prompt, self.tokens)
            self.outcomes.append(outcome)
            self.times_s.append((sent_s, time.monotonic()))

    def unexplained(self, decode_kills_s: list[float]) -> list[Outcome]:
        """The incomplete answers but for streams during which a decode worker was killed."""
        return [
            outcome
            for outcome, (sent_s, ended_s) in zip(self.outcomes, self.times_s, strict=True)
            if not outcome.is_complete
            and not (outcome.status == 200 and any(sent_s <= kill_s <= ended_s for kill_s in decode_kills_s))
        ]


class Chaos:
    """Does one random thing after the other to a deployment."""

    def __init__(self, deployment: Deployment, seed: int) -> None:
        self.deployment = deployment
        self.dice = random.Random(seed)
        self.story: list[str] = []
        self.decode_kills_s: list[float] = []
        self._kills_s: dict[str, list[float]] = defaultdict(list)

    async def run(self, lasts_s: float) -> None:
        end_s = time.monotonic() + lasts_s
        while time.monotonic() < end_s:
            acts = [self.kill, self.kill, self.kill, self.scale, self.scale_and_kill, self.stop_for_a_while]
            await self.dice.choice(acts)()
            await asyncio.sleep(self.dice.uniform(0.05, 0.8))

    async def kill(self, kind: str = "") -> None:
        kind = kind or self.dice.choice(sorted(VICTIMS))
        pid = self._one_of(kind)
        if not pid:
            return
        watcher = worker_name(pid) or kind
        recent = [each for each in self._kills_s[watcher] if time.monotonic() - each < 60]
        if len(recent) >= MOST_KILLS_A_MINUTE:
            return
        self._tell(f"kill {watcher} ({pid})")
        killed_s = time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._kills_s[watcher].append(killed_s)
        if kind == "decode":
            self.decode_kills_s.append(killed_s)

    async def scale_and_kill(self) -> None:
        """The plugin at any point of carrying out a decision."""
        await self.scale()
        await asyncio.sleep(self.dice.uniform(0, 0.3))
        await self.kill("plugin")

    async def scale(self) -> None:
        decode, prefill = self.dice.randint(1, 3), self.dice.randint(1, 3)
        result = await asyncio.to_thread(
            self.deployment.run, "scale", f"decode={decode}", f"prefill={prefill}", "--no-wait"
        )
        self._tell(f"scale to {decode} {prefill}: {result.returncode} {result.stderr[:80]}")

    async def stop_for_a_while(self) -> None:
        pid = self._one_of(self.dice.choice(["decode", "prefill"]))
        if not pid:
            return
        seconds = self.dice.uniform(1, 2)
        self._tell(f"stop {worker_name(pid)} ({pid}) for {seconds:.1f} s")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            os.kill(pid, signal.SIGCONT)

    def _one_of(self, kind: str) -> int:
        lines = processes_of(self.deployment)
        pids = sorted(pid for pid, line in lines.items() if VICTIMS[kind] in line)
        return self.dice.choice(pids) if pids else 0

    def _tell(self, text: str) -> None:
        self.story.append(f"{time.strftime('%H:%M:%S')} {text}")


class Witness:
    """Looks at the statefile and at the processes all the time, and remembers what must never be seen."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.samples = 0
        self.most_users = 0
        self.wrong: list[str] = []
        self._task = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while True:
            self._look_at_statefile()
            if self.samples % 10 == 0:
                self._look_at_processes()
            self.samples += 1
            await asyncio.sleep(0.02)

    def _look_at_statefile(self) -> None:
        try:
            document = json.loads(self.deployment.statefile_path.read_text())
        except (OSError, ValueError) as error:
            self.wrong.append(f"the statefile cannot be read: {error}")
            return
        resources = document["environment"]["SYSTEM_RESOURCES"]
        existing = {gpu["index"] for gpu in resources["gpus"]}
        owned = [
            gpu
            for entry in document["components"].values()
            for gpu in entry["resources"].get("allocated_gpus", ())
        ]
        if len(owned) != len(set(owned)) or not set(owned) <= existing:
            self.wrong.append(f"GPUs in the statefile: {owned} of {existing}")

    def _look_at_processes(self) -> None:
        """What is true, whatever the statefile says: who has which GPU in its environment."""
        users: dict[str, list[int]] = defaultdict(list)
        for pid, line in processes_of(self.deployment).items():
            if WORKER in line and ("VllmWorker" in line or "PrefillWorker" in line):
                for uuid in environment_of(pid).get("CUDA_VISIBLE_DEVICES", "").split(","):
                    users[uuid].append(pid)
        users.pop("", None)
        self.most_users = max(self.most_users, len(users))
        self.wrong += [f"{uuid} is in use by {pids}" for uuid, pids in users.items() if len(pids) > 1]

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def environment_of(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return {}
    return dict(part.partition("=")[::2] for part in text.split("\0") if part)


def worker_name(pid: int) -> str:
    return environment_of(pid).get("DYNAPLAN_WORKER_NAME", "")


async def prefill_queue_depth(deployment: Deployment) -> int:
    runtime_dir = Path(deployment.statefile()["addresses"]["runtime_dir"])
    messenger = await NatsMessenger.from_environment(json.loads((runtime_dir / "clients.json").read_text()))
    try:
        return await (await messenger.queue(prefill_stream(deployment.namespace))).depth()
    finally:
        await messenger.close()


@pytest.mark.timeout(LASTS_S + 120)
@pytest.mark.parametrize("seed", SEEDS)
async def test_whatever_dies_the_service_is_whole_in_the_end_and_no_request_is_lost(
    deploy: Callable[..., Deployment], seed: int
) -> None:
    options = ("--Planner.no-operation=true", "--gpus", str(GPUS))
    deployment = await asyncio.to_thread(deploy, "graphs.disagg:Frontend", "disagg.yaml", *options)
    witness, chaos = Witness(deployment), Chaos(deployment, seed)
    async with TimedLoad(deployment.url, MODEL, clients=4, tokens=40, prompt="word " * 900) as load:
        await chaos.run(LASTS_S)
        await whole_again(deployment, chaos)
        await load.stop()
    story = "\n".join(chaos.story)
    assert load.unexplained(chaos.decode_kills_s) == [], story
    assert len(load.outcomes) > LASTS_S, story

    await asyncio.to_thread(deployment.scale, decode=2, prefill=3)
    counts = {"VllmWorker": 2, "PrefillWorker": 3}
    await eventually(
        lambda: (
            is_whole(deployment)
            and all(len(deployment.workers(name)) == count for name, count in counts.items())
        ),
        60,
    )
    await witness.end()
    assert witness.wrong == [], story
    assert witness.most_users > 1
    assert witness.samples > 20 * LASTS_S
    assert await prefill_queue_depth(deployment) == 0
    assert_no_process_beyond_the_tree(deployment)
    assert await asyncio.to_thread(deployment.stop) == 0
    assert (processes_of(deployment), files_of(deployment)) == ({}, [])
    counts_seen = f"{len(load.outcomes)} requests, {len(load.incomplete)} cut, {witness.samples} looks"
    print(f"seed {seed}: {counts_seen}\n{story}")


async def whole_again(deployment: Deployment, chaos: Chaos) -> None:
    """Wait until every worker is ready; a failure tells what was done, and what the plugin says of it."""
    try:
        await eventually(lambda: is_whole(deployment), 45)
    except AssertionError:
        workers = {
            name: {key: worker[key] for key in ("state", "pid", "url", "reason", "restarts_s")}
            for name, worker in deployment.workers().items()
        }
        logs = sorted(deployment.directory.rglob("*.log"))
        ends = [f"== {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs]
        story = "\n".join(chaos.story)
        raise AssertionError(f"{story}\n{workers}\n" + "\n".join(ends)) from None


def assert_no_process_beyond_the_tree(deployment: Deployment) -> None:
    processes = processes_of(deployment)
    workers = {worker["pid"] for worker in deployment.workers().values()}
    others = {pid: line for pid, line in processes.items() if pid not in workers}
    assert workers <= set(processes)
    servers = {"etcd", "nats"} & VICTIMS.keys()
    assert len(others) == 1 + len(servers), others  # the plugin, and the servers that the store needs
