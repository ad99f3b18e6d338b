"""Faults in a running ``dynaplan serve``, one after the other, drawn from a seed."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import psutil

from tests.chaos.judging import FRONTEND, Judge
from tests.chaos.kernel import descriptors_exhausted, shut_down_a_connection
from tests.chaos.preloading import Preloaded
from tests.e2e.deployment import Deployment
from tests.e2e.held import environment_of, serve_of
from tests.e2e.traces import fill, processes_of

MOST_ENDS_A_MINUTE = 4
"""Of one worker: after one more it counts as failed, which is right, but not what is tested here."""

VICTIMS = {
    "decode": "--service-name VllmWorker",
    "prefill": "--service-name PrefillWorker",
    "planner": "--service-name Planner",
    "frontend": "--service-name Frontend",
    "plugin": "FleetPlugin",
    "etcd": "etcd --name",
    "nats": "nats-server",
}
if os.environ.get("DYN_DISCOVERY_BACKEND", "etcd") != "etcd":
    del VICTIMS["etcd"]

SERVERS_DATA = {"etcd": "etcd/data", "nats": "nats/jetstream"}


class Chaos:
    """Does one random thing after the other to a deployment, and tells the judge what it has harmed."""

    def __init__(
        self,
        deployment: Deployment,
        seed: int,
        judge: Judge,
        disk: Path | None,
        library: Preloaded | None = None,
    ) -> None:
        self.deployment = deployment
        self.seed = seed
        self.dice = random.Random(seed)
        self.judge = judge
        self.story: list[str] = []
        self.blind_s = 0.0
        """The last moment at which the plugin could not see, or not write."""
        self._disk = disk
        self._library = library
        self._ahead_s = 0.0
        self._ends_s: dict[str, list[float]] = defaultdict(list)

    async def run(self, lasts_s: float) -> None:
        end_s = time.monotonic() + lasts_s
        acts: list[Callable[[], Awaitable[None]]] = [
            *[self.kill] * 5,
            *[self.scale] * 2,
            *[self.stop_for_a_while] * 2,
            self.scale_and_kill_plugin,
            self.terminate,
            self.cut_a_connection,
            self.take_descriptors,
            self.fill_the_disk,
            self.wipe,
            self.kill_serve,
            self.set_the_clock,
            self.slow_the_disk,
        ]
        number = 0
        while time.monotonic() < end_s:
            number += 1
            # Of its own for each act: what one meets does not change what the next one is.
            self.dice = random.Random(f"{self.seed} {number}")
            await self.dice.choice(acts)()
            await asyncio.sleep(self.dice.uniform(0.05, 0.8))

    async def kill(self, kind: str = "") -> None:
        kind = kind or self.dice.choice(sorted(VICTIMS))
        if pid := self._one_of(kind):
            self._end(kind, pid, signal.SIGKILL)

    async def terminate(self) -> None:
        kind = self.dice.choice(["decode", "prefill"])
        if pid := self._one_of(kind):
            self._end(kind, pid, signal.SIGTERM)

    def _end(self, kind: str, pid: int, number: signal.Signals) -> None:
        name = worker_name(pid) or kind
        recent = [each for each in self._ends_s[name] if time.monotonic() - each < 60]
        if len(recent) >= MOST_ENDS_A_MINUTE:
            return
        self._tell(f"{number.name} {name} ({pid})")
        self._ends_s[name] = [*recent, time.monotonic()]
        if number is signal.SIGKILL:
            self.judge.harmed(time.monotonic(), name)
        self._note_plugin(kind)
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    async def kill_serve(self) -> None:
        """The supervisor starts it again; no request may notice."""
        serve = serve_of(self.deployment)
        if serve:
            self._end("serve", serve.pid, signal.SIGKILL)

    async def scale_and_kill_plugin(self) -> None:
        """The plugin at any point of carrying out a decision."""
        await self.scale()
        await asyncio.sleep(self.dice.uniform(0, 0.3))
        await self.kill("plugin")

    async def scale(self) -> None:
        decode, prefill = self.dice.randint(1, 3), self.dice.randint(1, 3)
        arguments = ("scale", f"decode={decode}", f"prefill={prefill}", "--no-wait")
        result = await asyncio.to_thread(self.deployment.run, *arguments)
        self._tell(f"scale to {decode} {prefill}: {result.returncode} {result.stderr[:80]}")

    async def stop_for_a_while(self) -> None:
        kind = self.dice.choice(sorted(VICTIMS))
        pid = self._one_of(kind)
        if not pid:
            return
        seconds = self.dice.uniform(0.2, 2)
        self._tell(f"stop {worker_name(pid) or kind} ({pid}) for {seconds:.1f} s")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
        self._note_plugin(kind)

    async def wipe(self) -> None:
        """A server of the deployment loses its data."""
        kind = self.dice.choice(sorted(VICTIMS.keys() & SERVERS_DATA.keys()))
        pid = self._one_of(kind)
        if not pid:
            return
        runtime_dir = Path(self.deployment.statefile()["addresses"]["runtime_dir"])
        self._tell(f"kill and wipe {kind} ({pid})")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            shutil.rmtree(runtime_dir / SERVERS_DATA[kind], ignore_errors=True)
            os.kill(pid, signal.SIGKILL)

    async def cut_a_connection(self) -> None:
        """Between a frontend and anybody: a client, a worker, the store."""
        kind = self.dice.choice(["frontend", "decode"])
        if pid := self._one_of(kind):
            name = worker_name(pid)
            if cut := shut_down_a_connection(pid, self.dice):
                self._tell(f"cut {cut} of {name} ({pid})")
                self.judge.harmed(time.monotonic(), name, FRONTEND, "VllmWorker")

    async def take_descriptors(self) -> None:
        kind = self.dice.choice(["decode", "prefill", "frontend", "plugin"])
        if pid := self._one_of(kind):
            seconds = self.dice.uniform(0.2, 1.5)
            self._tell(f"no descriptors for {worker_name(pid) or kind} ({pid}) for {seconds:.1f} s")
            with suppress(psutil.Error), descriptors_exhausted(pid):
                self.judge.harmed(time.monotonic(), worker_name(pid))
                await asyncio.sleep(seconds)
                self.judge.harmed(time.monotonic(), worker_name(pid))
            self._note_plugin(kind)

    async def fill_the_disk(self) -> None:
        """The one that the statefile is on, where it has one of its own."""
        if self._disk:
            seconds = self.dice.uniform(0.2, 2)
            self._tell(f"the statefile's disk is full for {seconds:.1f} s")
            ballast = fill(self._disk)
            await asyncio.sleep(seconds)
            ballast.unlink()
            self.blind_s = time.monotonic()

    async def set_the_clock(self) -> None:
        """The wall clock of all processes but the servers', of commands too."""
        if self._library:
            self._ahead_s = self.dice.choice([-86400.0, -30.0, 0.0, 30.0, 86400.0])
            self._tell(f"the wall clock is {self._ahead_s:g} s ahead")
            self._library.tell(ahead_s=self._ahead_s)

    async def slow_the_disk(self) -> None:
        """Each write that waits for the disk takes a while, of all processes but the servers."""
        if self._library:
            seconds, write_s = self.dice.uniform(0.5, 3), self.dice.choice([0.05, 0.3, 1.0])
            self._tell(f"writes take {write_s} s for {seconds:.1f} s")
            self._library.tell(ahead_s=self._ahead_s, write_s=write_s)
            await asyncio.sleep(seconds)
            self._library.tell(ahead_s=self._ahead_s)
            self.blind_s = time.monotonic() + 3 * write_s  # two syncs and a rename may be under way

    def _note_plugin(self, kind: str) -> None:
        if kind == "plugin":
            self.blind_s = time.monotonic()

    def _one_of(self, kind: str) -> int:
        lines = processes_of(self.deployment)
        pids = sorted(pid for pid, line in lines.items() if VICTIMS[kind] in line)
        return self.dice.choice(pids) if pids else 0

    def _tell(self, text: str) -> None:
        self.story.append(f"{time.monotonic():.3f} {text}")


def worker_name(pid: int) -> str:
    return environment_of(pid).get("DYNAPLAN_WORKER_NAME", "")
