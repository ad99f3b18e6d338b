"""A real arbiter with its plugin, real etcd and NATS, plain services: what must hold whatever dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dynaplan.contract.store_keys import DesiredCounts, planner_prefix
from dynaplan.store.etcd import EtcdStore
from dynaplan.store.model import Transaction
from tests.e2e.deployment import Deployment
from tests.fakes.polling import PATIENCE_S, eventually, wait_until
from tests.fakes.processes import freeze
from tests.fakes.servers import Server


class Plain(Deployment):
    """One ``serve`` of the plain graph."""

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        namespace: str = "plain",
        environment: dict[str, str] | None = None,
    ) -> None:
        super().__init__(directory, namespace=namespace, environment=environment)
        self.command = [sys.executable, "-m", "tests.fakes.serve_plain", f"namespace={namespace}", *arguments]
        self.everybody: set[psutil.Process] = set()

    def pids(self) -> dict[str, int]:
        return {name: entry["pid"] for name, entry in self.workers().items()}

    def states(self, component: str = "") -> list[str]:
        return sorted(entry["state"] for entry in self.workers(component).values())

    def gpus(self) -> list[int]:
        return sorted(
            gpu for entry in self.workers().values() for gpu in entry["resources"].get("allocated_gpus", ())
        )

    def engines(self) -> list[psutil.Process]:
        """The engine processes of the workers."""
        return [child for child in self.children() if "trap" in command_line(child)]

    @property
    def scratch(self) -> Path:
        """The directory in memory that its workers are told."""
        return Path(psutil.Process(self.pids()["plain_VllmWorker"]).environ()["DYNAPLAN_SCRATCH_DIR"])

    def is_ready(self) -> bool:
        states = self.states()
        return bool(states) and set(states) == {"ready"}

    def children(self) -> list[psutil.Process]:
        children = super().children()
        self.everybody.update(children)
        return children

    def child(self, marker: str) -> psutil.Process:
        return next(child for child in self.children() if marker in command_line(child))

    def circusctl(self, *arguments: str) -> str:
        command = [str(Path(sys.executable).with_name("circusctl"))]
        command += ["--endpoint", self.statefile()["circus_endpoint"], *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def store(self) -> EtcdStore:
        return EtcdStore.from_environment({"ETCD_ENDPOINTS": self.statefile()["addresses"]["etcd"]})

    def left(self) -> list[psutil.Process]:
        return [
            each for each in self.everybody if each.is_running() and each.status() != psutil.STATUS_ZOMBIE
        ]

    def stop(self, timeout_s: float = PATIENCE_S) -> int:
        self.children()
        return super().stop(timeout_s)

    @property
    def pid(self) -> int:
        assert self.process
        return self.process.pid

    def ended(self, timeout_s: float = PATIENCE_S) -> int:
        """The exit code, when it has ended."""
        assert self.process
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        self.children()
        os.kill(self.pid, signal.SIGKILL)
        self.ended()


def command_line(process: psutil.Process) -> str:
    """Empty for one that is just ending."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def children_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [child for process in processes for child in process.children()]


def files_of(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def name_of(process: psutil.Process) -> str:
    """Empty for one that is just ending."""
    try:
        return process.name()
    except psutil.Error:
        return ""


Start = Callable[..., Plain]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Plain] = []

    def begin(*arguments: str, wait: bool = True, **keywords: Any) -> Plain:
        running.append(made := Plain(tmp_path, *arguments, **keywords))
        return made.start() if wait else made.spawn()

    yield begin
    for each in running:
        if each.process and each.process.poll() is None:
            each.kill()  # what it leaves to do in order is tested where that is the rule
        each.close()


async def decide(plain: Plain, **counts: int) -> int:
    """Write a decision as a planner does, after the first one, which is the plugin's; its id."""
    prefix = planner_prefix(plain.namespace)
    await eventually(lambda: is_decided(plain))
    store = plain.store()
    try:
        before = await counts_of(plain)
        keys = {f"num_{role}_workers": str(number) for role, number in counts.items()}
        keys["decision_id"] = str(before.next_decision_id)
        assert await store.commit(Transaction(puts={prefix + key: value for key, value in keys.items()}))
        return before.next_decision_id
    finally:
        await store.close()


async def counts_of(plain: Plain) -> DesiredCounts:
    store = plain.store()
    try:
        items = await store.list(planner_prefix(plain.namespace))
        return DesiredCounts.from_keys(plain.namespace, {item.key: item.value for item in items})
    finally:
        await store.close()


async def is_decided(plain: Plain) -> bool:
    return (await counts_of(plain)).decision_id >= 0


async def wait_carried_out(plain: Plain, decision_id: int) -> bool:
    return (await counts_of(plain)).scaled_decision_id >= decision_id


async def test_decisions_scale_up_and_down_and_are_acknowledged(start: Start) -> None:
    plain = start()
    decision = await decide(plain, decode=3, prefill=2)
    await eventually(lambda: wait_carried_out(plain, decision))
    assert plain.states("VllmWorker") == ["ready"] * 3
    assert plain.states("PrefillWorker") == ["ready"] * 2
    assert plain.gpus() == [0, 1, 2, 3, 4]

    decision = await decide(plain, decode=1, prefill=0)
    await eventually(lambda: wait_carried_out(plain, decision))
    await eventually(lambda: plain.gpus() == [0])
    assert set(plain.workers()) == {"plain_Entry", "plain_VllmWorker"}
    assert plain.statefile()["components"]["plain_PrefillWorker"]["state"] == "stopped"
    assert "killed" not in plain.text
    await eventually(lambda: "plain_vllmworker_1" not in plain.circusctl("list").lower())

    decision = await decide(plain, decode=1, prefill=1)
    await eventually(lambda: wait_carried_out(plain, decision))
    assert plain.states("PrefillWorker") == ["ready"]


async def test_a_killed_worker_comes_back_with_its_gpus(start: Start) -> None:
    plain = start()
    before = plain.workers()["plain_VllmWorker"]
    os.kill(before["pid"], signal.SIGKILL)
    wait_until(lambda: plain.is_ready() and plain.pids()["plain_VllmWorker"] != before["pid"])
    after = plain.workers()["plain_VllmWorker"]
    assert after["resources"] == before["resources"]
    assert after["lease"] != before["lease"]
    (line,) = (each for each in plain.text.splitlines() if "ended unasked" in each)
    assert line.startswith("plain_VllmWorker ended unasked (killed by SIGKILL")
    assert line.endswith("; it starts again at once.")


async def test_a_worker_whose_lease_is_revoked_by_others_is_replaced(start: Start) -> None:
    plain = start()
    before = plain.workers()["plain_VllmWorker"]
    store = plain.store()
    await store.revoke(before["lease"])
    await store.close()
    await eventually(lambda: plain.is_ready() and plain.pids()["plain_VllmWorker"] != before["pid"])


async def test_a_killed_plugin_finishes_what_was_begun(start: Start) -> None:
    plain = start()
    pids = plain.pids()
    decision = await decide(plain, decode=2)
    wait_until(lambda: plain.states("VllmWorker") != ["ready"], interval_s=0.001)
    plugin = plain.child("FleetPlugin")
    plugin.kill()
    await eventually(lambda: wait_carried_out(plain, decision))
    assert {name: pid for name, pid in plain.pids().items() if name in pids} == pids
    assert plain.states("VllmWorker") == ["ready", "ready"]
    assert plain.child("FleetPlugin").pid != plugin.pid

    decision = await decide(plain, decode=1)
    plain.child("FleetPlugin").kill()
    await eventually(lambda: wait_carried_out(plain, decision))
    await eventually(lambda: plain.gpus() == [0, 1])


async def test_a_killed_etcd_comes_back_and_no_worker_is_restarted(start: Start) -> None:
    plain = start()
    pids = plain.pids()
    old = next(child for child in plain.children() if name_of(child) == "etcd")
    old.kill()
    wait_until(lambda: [child for child in plain.children() if name_of(child) == "etcd" and child != old])
    decision = -1

    async def decided() -> bool:
        nonlocal decision
        try:
            decision = await decide(plain, decode=2)
        except Exception:
            return False
        return True

    await eventually(decided)
    await eventually(lambda: wait_carried_out(plain, decision))
    assert {name: pid for name, pid in plain.pids().items() if name in pids} == pids


async def test_what_engines_and_their_files_are_left_by_a_killed_serve_the_next_one_ends(
    start: Start,
) -> None:
    plain = start("engine=1")
    engines, scratch = plain.engines(), plain.scratch
    assert engines
    plain.kill()
    wait_until(lambda: set(plain.left()) <= {*engines, *children_of(engines)}, 5)
    assert scratch.exists()
    again = start()
    assert "killed plain_VllmWorker (session" in again.text
    wait_until(lambda: not plain.left())
    assert again.scratch == scratch
    assert files_of(scratch) == []
    assert again.stop() == 0


async def test_a_second_serve_of_the_namespace_is_refused(start: Start) -> None:
    plain = start()
    second = start(wait=False)
    assert second.ended() == 2
    assert f"already running here (pid {plain.pid})" in second.text
    assert plain.is_ready()


async def test_two_namespaces_share_the_gpus(start: Start) -> None:
    one = start("gpus=4")
    other = start("gpus=4", namespace="other")
    assert one.gpus() == [0, 1]
    assert other.gpus() == [2, 3]
    third = start("gpus=4", namespace="third", wait=False)
    assert third.ended() == 2
    assert "does not fit" in third.text


async def test_a_worker_that_can_never_start_fails_with_its_reason(start: Start) -> None:
    plain = start("never=1", wait=False)
    wait_until(lambda: plain.states("VllmWorker") == ["failed"])
    wait_until(lambda: "plain_VllmWorker has failed" in plain.text)
    assert "the reason is in the log" in plain.text
    assert plain.gpus() == [1]
    wait_until(lambda: plain.states() == ["failed", "ready", "ready"])
    assert plain.stop() == 0


async def test_a_stopped_worker_cannot_hold_up_scaling_down(start: Start) -> None:
    plain = start("drain=1", "decode=2")
    freeze(plain.pids()["plain_VllmWorker_1"])
    await decide(plain, decode=1)
    await eventually(lambda: "plain_VllmWorker_1" not in plain.workers())
    assert "plain_VllmWorker_1 did not leave" in plain.text
    assert plain.states("VllmWorker") == ["ready"]


@pytest.mark.slow
async def test_sighup_does_not_hurt_and_circusctl_works(start: Start) -> None:
    plain = start()
    pids = plain.pids()
    os.kill(plain.pid, signal.SIGHUP)
    assert "plain_vllmworker: active" in plain.circusctl("status").lower()
    assert "plain_vllmworker" in plain.circusctl("list").lower()
    assert plain.circusctl("numprocesses").strip() == "6"
    assert "graceful_timeout" in plain.circusctl("options", "plain_VllmWorker")
    assert str(pids["plain_VllmWorker"]) in plain.circusctl("stats", "plain_VllmWorker")
    assert plain.pids() == pids
    plain.children()
    plain.circusctl("quit")
    assert plain.ended(10) == 0
    assert plain.left() == []
    assert not plain.statefile_path.exists()


async def test_the_processes_of_an_engine_and_its_files_end_with_its_worker(start: Start) -> None:
    plain = start("engine=1", "decode=2")
    scratch = plain.scratch
    before = set(plain.engines())
    assert len(before) == 4
    assert files_of(scratch) == ["plain_VllmWorker.slot", "plain_VllmWorker_1.slot"]
    killed = plain.pids()["plain_VllmWorker"]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: plain.is_ready() and plain.pids()["plain_VllmWorker"] != killed)
    assert len(set(plain.engines()) & before) == 2
    decision = await decide(plain, decode=1)
    await eventually(lambda: wait_carried_out(plain, decision))
    await eventually(lambda: len(plain.engines()) == 2)
    await eventually(lambda: files_of(scratch) == ["plain_VllmWorker.slot"])
    assert plain.stop() == 0
    assert plain.left() == []
    assert not scratch.exists()


@pytest.mark.slow
async def test_a_worker_that_stands_still_is_replaced(start: Start) -> None:
    plain = start("engine=1", "decode=2", "hang=1")
    before = plain.pids()
    freeze(before["plain_VllmWorker_1"])
    wait_until(
        lambda: plain.is_ready() and plain.pids()["plain_VllmWorker_1"] != before["plain_VllmWorker_1"], 25
    )
    assert "plain_VllmWorker_1 stands still: no answer for 1 s" in plain.text
    assert "plain_VllmWorker_1 ended unasked (killed by SIGKILL" in plain.text
    del before["plain_VllmWorker_1"]
    assert before.items() <= plain.pids().items()
    assert len(plain.engines()) == 4
    assert plain.stop() == 0
    assert plain.left() == []


@pytest.mark.parametrize("how", ["stop", "scale"])
async def test_a_worker_that_still_loads_holds_nobody_up(start: Start, how: str) -> None:
    plain = start("loads=1", "drain=20", wait=False)
    wait_until(lambda: plain.states() == ["ready", "ready", "starting"], 20)
    begun_s = time.monotonic()
    if how == "stop":
        assert plain.stop() == 0
    else:
        await decide(plain, decode=0)
        await eventually(lambda: not plain.workers("VllmWorker"))
    assert time.monotonic() - begun_s < 15  # the drain's deadline is 20 s
    assert "killed" not in plain.text


async def test_servers_that_the_environment_names_are_used_and_left_clean(
    start: Start,
    etcd: Server,
    nats: Server,
) -> None:
    plain = start(environment={**etcd.environment, **nats.environment})
    assert not {"etcd", "nats-server"} & {child.name() for child in plain.children()}
    await eventually(lambda: wait_carried_out(plain, 0))
    store = EtcdStore.from_environment(etcd.environment)
    assert await store.list("v1/plain/") != ()
    assert plain.stop() == 0
    assert await store.list("v1/") == await store.list("/services/") == ()
    await store.close()


async def test_circus_on_tcp_takes_commands(start: Start) -> None:
    plain = start("tcp=1")
    assert plain.statefile()["circus_endpoint"].startswith("tcp://127.0.0.1:")
    assert "plain_vllmworker: active" in plain.circusctl("status").lower()
