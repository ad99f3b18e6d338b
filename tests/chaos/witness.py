"""Looks at a running deployment all the time, and remembers what must never be seen."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.chaos.deployment_faults import VICTIMS, Chaos
from tests.e2e.deployment import Deployment
from tests.e2e.held import environment_of
from tests.e2e.traces import processes_of

WORKER = "dynaplan.worker.main"
"""The module in the command line of every worker."""

NOTICED_S = 10.0
"""Seconds within which a death is in the statefile, on a busy machine."""


class Witness:
    """No GPU has two owners; nobody is said to be ready who is long dead."""

    def __init__(self, deployment: Deployment, chaos: Chaos) -> None:
        self.deployment = deployment
        self.chaos = chaos
        self.samples = 0
        self.most_users = 0
        self.wrong: list[str] = []
        self._gone_since_s: dict[int, float] = {}
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
        entries = document["components"].values()
        owned = [gpu for entry in entries for gpu in entry["resources"].get("allocated_gpus", ())]
        if len(owned) != len(set(owned)) or not set(owned) <= existing:
            self.wrong.append(f"GPUs in the statefile: {owned} of {existing}")
        self._look_at_the_ready([entry for entry in entries if entry.get("state") == "ready"])

    def _look_at_the_ready(self, ready: list[dict[str, Any]]) -> None:
        now_s = time.monotonic()
        states = {entry["pid"]: process_state(entry["pid"]) for entry in ready}
        gone = {pid for pid, state in states.items() if state in ("", "Z")}
        self._gone_since_s = {pid: self._gone_since_s.get(pid, now_s) for pid in gone}
        for pid, since_s in self._gone_since_s.items():
            if now_s - max(since_s, self.chaos.blind_s) > NOTICED_S:
                self.wrong.append(f"{now_s:.1f}: {pid} is ready, it says, and gone since {since_s:.1f}")
        decode = [entry["pid"] for entry in ready if entry.get("component") == "VllmWorker"]
        if all(states[pid] in ("", "Z", "T") for pid in decode):
            self.chaos.judge.without_decode.append(now_s)

    def _look_at_processes(self) -> None:
        """What is true, whatever the statefile says: who has which GPU in its environment."""
        users: dict[str, list[int]] = defaultdict(list)
        lines = processes_of(self.deployment)
        if not any(VICTIMS["plugin"] in line for line in lines.values()):
            now_s = time.monotonic()
            self.chaos.blind_s = max(self.chaos.blind_s, now_s)  # it is started again, or serve above it
        for pid, line in lines.items():
            if WORKER in line and ("VllmWorker" in line or "PrefillWorker" in line):
                for uuid in environment_of(pid).get("CUDA_VISIBLE_DEVICES", "").split(","):
                    users[uuid].append(pid)
        users.pop("", None)
        self.most_users = max(self.most_users, len(users))
        self.wrong += [f"{uuid} is in use by {pids}" for uuid, pids in users.items() if len(pids) > 1]

    async def end(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


def process_state(pid: int) -> str:
    """The letter of the process's state, as in ``ps``; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""
