"""A circus arbiter, the processes it starts, and the store's end of the fleet plugin, all in memory."""

from __future__ import annotations

from typing import Any

from dynaplan.contract.model_keys import ModelDemand
from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.fleet.circus_client import CommandRefused
from dynaplan.process.heartbeats import Heartbeat
from dynaplan.process.identity import ProcessIdentity
from dynaplan.store.instances import Instance


class FakeCircus:
    """Watchers with one process each.

    As circus 0.19 does: a watcher without process says no to nothing but its pid is 0, ``add`` of a name
    that exists is refused, ``add`` of what cannot be started says ok and 0.
    """

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self.environments: dict[str, dict[str, str]] = {}
        self.signals: list[tuple[str, int]] = []
        self.last_pid = 100
        self.can_start = True

    async def pid(self, name: str) -> int:
        if name not in self.pids:
            raise CommandRefused(f"program {name} not found")
        return self.pids[name]

    async def add(self, name: str, cmd: str, args: list[str], options: dict[str, Any]) -> int:
        if name in self.pids:
            raise CommandRefused(f"{name!r} already exist")
        self.last_pid += 1
        self.pids[name] = self.last_pid if self.can_start else 0
        self.environments[name] = options["env"]
        return self.pids[name]

    async def remove(self, name: str) -> None:
        self.pids.pop(name, None)

    async def signal(self, name: str, signal_number: int) -> None:
        self.signals.append((name, signal_number))

    async def statuses(self) -> dict[str, str]:
        return {name: "active" if pid else "stopped" for name, pid in self.pids.items()}

    def end(self, name: str) -> int:
        """The worker's process ends; its pid."""
        pid, self.pids[name] = self.pids[name], 0
        return pid


class FakeProcesses:
    """The processes of a FakeCircus, each started at ten times its pid, and alone in its group."""

    def __init__(self, circus: FakeCircus) -> None:
        self.circus = circus
        self.killed: list[int] = []
        self.killed_for_memory = 3

    def identify(self, pid: int) -> int | None:
        return pid * 10 if pid in self.circus.pids.values() else None

    def identity_of(self, pid: int) -> ProcessIdentity:
        return ProcessIdentity(pid, pid * 10, "boot")

    def is_alive(self, process: ProcessIdentity) -> bool:
        return self.identify(process.pid) is not None

    def kill(self, process: ProcessIdentity) -> None:
        self.killed.append(process.pid)

    def kill_group(self, pid: int, started_at: int, waits_s: float = 0.0) -> tuple[int, ...]:
        if self.identify(pid) != started_at:
            return ()
        self.killed.append(pid)
        self.circus.end(next(name for name, each in self.circus.pids.items() if each == pid))
        return (pid,)

    def oom_kills(self) -> tuple[int, str]:
        return self.killed_for_memory, "this machine"


class FakeLink:
    """The store's end: what a test puts in, and what the reconciler wrote."""

    def __init__(self) -> None:
        self.counts: DesiredCounts | None = None
        self.instances: tuple[Instance, ...] | None = None
        self.unanswered: set[int] = set()
        self.leave_first = ""
        self.asleep: frozenset[int] = frozenset()
        self.sleep_reasons: dict[int, str] = {}
        self.sleep_orders: dict[int, str] = {}
        self.woken: list[int] = []
        self.model_demand: dict[str, ModelDemand] | None = {}
        self.model_orders: str | None = ""
        self.model_workers: str | None = ""
        self.revoked: list[int] = []
        self.acknowledged: list[int] = []
        self.fleet: dict[str, Any] = {}
        self.first: dict[str, str] = {}

    def revoke(self, lease: int) -> None:
        self.revoked.append(lease)

    def acknowledge(self, decision_id: int) -> None:
        self.acknowledged.append(decision_id)

    def put_to_sleep(self, instance_id: int, level: str) -> None:
        self.sleep_orders[instance_id] = level

    def wake_up(self, instance_id: int) -> None:
        self.sleep_orders.pop(instance_id, None)
        self.woken.append(instance_id)

    def publish_fleet(self, document: dict[str, Any]) -> None:
        self.fleet = document

    def decide_first(self, keys: dict[str, str]) -> None:
        self.first = keys


class FakeClaims:
    """GPUs of which some belong to others."""

    def __init__(self, *foreign: str) -> None:
        self.others = set(foreign)
        self.held: set[str] = set()

    def claim(self, uuids: Any) -> set[str]:
        obtained = set(uuids) - self.others
        self.held |= obtained
        return obtained

    def release(self, uuids: Any) -> None:
        self.held -= set(uuids)

    def held_by_others(self, uuids: Any) -> dict[str, str]:
        return {uuid: "somebody" for uuid in uuids if uuid in self.others}


class FakeHealthPoll:
    """Who is asked, and for how long each has been silent."""

    def __init__(self) -> None:
        self.asked: dict[str, str] = {}
        self.silent_s: dict[str, float] = {}

    def poll(self, urls: Any) -> None:
        self.asked = dict(urls)


class FakeStallDetector:
    """For how long each heartbeat has not moved, beyond its interval."""

    def __init__(self) -> None:
        self.overdue: dict[str, float] = {}

    def overdue_s(self, name: str, pid: int) -> float:
        return self.overdue.get(name, 0.0)


class FakeHeartbeats:
    """Heartbeats that nobody reads: no process has ever beaten."""

    def beat(self, name: str, every_s: float) -> None:
        pass

    def read(self, name: str) -> Heartbeat | None:
        return None


class FakeStartupTimes:
    """Start-up times that were learnt, in their order."""

    def __init__(self) -> None:
        self.learnt: list[tuple[str, float]] = []

    def read(self) -> dict[str, list[float]]:
        return {}

    def learn(self, key: str, seconds: float) -> None:
        self.learnt.append((key, seconds))


class FakeTerminal:
    """The lines that the user has read."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def report(self, line: str) -> None:
        self.lines.append(line)
