"""Two fleet keepers of one user on one box, with real claims: each gives and takes what it must."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dynaplan.fleet.desired_counts import DesiredCounts
from dynaplan.fleet.gpu_claims import NodeClaims
from dynaplan.fleet.gpus import GpuShare
from dynaplan.fleet.plugin.gpu_sharing import GpuSharing
from dynaplan.graph.lifecycle import Role
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.process.identity import ProcessIdentity
from dynaplan.process.process_table import identity_of
from tests.unit.fleet.plugin.box import Box

OURS, THEIRS = identity_of(os.getpid()), identity_of(os.getppid())
DEAD = replace(THEIRS, started_at=THEIRS.started_at - 1)


class SharingBox(Box):
    """A keeper of single-GPU decode workers, in a namespace that shares the four GPUs."""

    def __init__(
        self, base: Path, namespace: str, arbiter: ProcessIdentity, priority: int = 0, reserved: int = 0
    ) -> None:
        super().__init__(base)
        services = (ServiceSpec("Frontend", Role.FRONTEND), ServiceSpec("VllmWorker", Role.DECODE, gpus=1))
        graph = GraphSpec("graphs.agg:Frontend", "/srv/project", namespace, services)
        self.launch = replace(self.launch, graph=graph, arbiter=arbiter)
        self.claims = NodeClaims(arbiter, namespace, base / "node")
        visible = frozenset(gpu.uuid for gpu in self.launch.gpus)
        share = GpuShare(namespace, arbiter.pid, priority, reserved, visible)
        self.sharing = GpuSharing(share, graph, self.launch.gpus, self.claims, self)
        self.new_keeper()

    async def scale(self, decode: int) -> None:
        before = self.link.counts.decision_id if self.link.counts else -1
        self.link.counts = DesiredCounts(-1, decode, before + 1, before)
        await self.settle()

    def gpus(self) -> set[int]:
        return {gpu for worker in self.keeper.workers.values() for gpu in worker.gpus}

    def draining(self) -> list[str]:
        return [name for name, state in self.states().items() if state == "draining"]

    def drain(self) -> None:
        """The requests of the workers that leave are done."""
        for name in self.draining():
            self.keeper.note_exit(self.circus.end(name), 0)

    @property
    def waiting(self) -> str:
        return str(self.link.fleet["waiting"].get("VllmWorker", ""))


async def in_turn(*boxes: SharingBox, rounds: int = 6) -> None:
    """Passes of all, with every draining worker gone at the next one; no GPU ever has two owners."""
    for _ in range(rounds):
        for box in boxes:
            box.drain()
            await box.settle(1)
            held = [gpu for each in boxes for gpu in each.gpus()]
            assert len(held) == len(set(held)), "no GPU has two owners"
            assert sum(len(each.draining()) for each in boxes) <= 1, "one GPU at a time"


async def test_the_higher_priority_gets_a_gpu_after_its_worker_has_drained_and_both_say_why(
    tmp_path: Path,
) -> None:
    one, two = SharingBox(tmp_path, "one", OURS, reserved=2), SharingBox(tmp_path, "two", THEIRS, priority=5)
    await one.scale(3)
    await two.scale(1)
    await two.scale(3)
    assert "deployment 'one' is to give one (gpu-priority 5 over 0)" in two.waiting

    await one.settle()
    assert one.draining() == ["one_VllmWorker_2"]
    why = "deployment 'two' needs its GPU (gpu-priority 5 over 0)"
    assert f"one_VllmWorker_2 leaves when its requests are done: {why}" in one.said
    assert one.link.fleet["removals"][-1]["why"] == why
    await two.settle()
    assert len(two.gpus()) == 1, "it has not drained yet"
    assert "a worker of deployment 'one' drains, to give its GPU" in two.waiting

    await in_turn(one, two)
    assert (len(one.gpus()), len(two.gpus())) == (2, 2), "one keeps what is reserved"
    assert "deployment 'one' gives none: it keeps reserved-gpus 2" in two.waiting
    assert any("deployment 'one' is to give one" in line for line in two.said)
    assert "claimed by deployment 'two'" in one.waiting
    assert set(two.link.acknowledged) == {0}

    await two.scale(1)
    await in_turn(two, one)
    assert (len(one.gpus()), len(two.gpus())) == (3, 1), "what is not needed any more goes back"


async def test_equals_keep_what_they_have_and_a_reserve_is_owed(tmp_path: Path) -> None:
    one, two = SharingBox(tmp_path, "one", OURS, 3), SharingBox(tmp_path, "two", THEIRS, 3)
    await one.scale(3)
    await two.scale(3)
    await in_turn(one, two)
    assert (len(one.gpus()), len(two.gpus())) == (3, 1)
    assert "its gpu-priority is 3, this one's 3" in two.waiting

    owed = SharingBox(tmp_path, "two", THEIRS, 0, reserved=2)
    owed.circus, owed.link, owed.written = two.circus, two.link, two.written
    owed.processes = two.processes
    owed.new_keeper()
    await in_turn(one, owed)
    assert (len(one.gpus()), len(owed.gpus())) == (2, 2)
    assert any("it has 1 of its reserved-gpus 2" in line for line in one.said)


async def test_a_giver_keeps_a_worker_that_answers_and_starts_none_on_a_gpu_that_was_given(
    tmp_path: Path,
) -> None:
    one, two = SharingBox(tmp_path, "one", OURS), SharingBox(tmp_path, "two", THEIRS, 5)
    await one.scale(4)
    await two.scale(2)
    for _ in range(8):
        one.drain()
        await one.settle(2)  # twice as often as the other
        await two.settle(1)
    assert (len(one.gpus()), len(two.gpus())) == (2, 2)
    await two.scale(4)
    await in_turn(one, two, rounds=10)
    assert (len(one.gpus()), len(two.gpus())) == (1, 3)
    assert one.states()["one_VllmWorker"] == "ready"


@pytest.mark.parametrize("how", ["dead", "withdrawn", "failing"])
async def test_nothing_is_given_to_one_that_is_gone_or_cannot_start(tmp_path: Path, how: str) -> None:
    arbiter = DEAD if how == "dead" else THEIRS
    one, two = SharingBox(tmp_path, "one", OURS), SharingBox(tmp_path, "two", arbiter, 5)
    await one.scale(4)
    if how == "failing":
        two.circus.can_start = False
        await one.scale(3)
        one.drain()
        await one.settle()
        await two.scale(1)
        for _ in range(200):
            two.now += 5
            await two.settle(1)
            if set(two.states().values()) == {"failed"}:
                break
        assert set(two.states().values()) == {"failed"}
        await two.settle(1)
        await one.scale(4)
    else:
        await two.scale(2)
        assert two.waiting
    if how == "withdrawn":
        two.claims.withdraw()
        two.claims.withdraw()
    for _ in range(6):
        one.now += 5
        await one.settle(1)
    assert len(one.gpus()) == 4
    assert not one.draining()
    assert how != "dead" or not list((tmp_path / "node").glob(f"share-{DEAD.pid}.*"))


async def test_a_keeper_that_dies_after_its_promise_gives_one_gpu_and_not_two(tmp_path: Path) -> None:
    one, two = SharingBox(tmp_path, "one", OURS), SharingBox(tmp_path, "two", THEIRS, 5)
    await one.scale(4)
    await two.scale(1)
    one.is_disk_full = True
    await one.keeper.one_pass()
    one.is_disk_full = False
    one.new_keeper()
    await one.settle()
    assert len(one.draining()) == 1
    await in_turn(one, two)
    assert (len(one.gpus()), len(two.gpus())) == (3, 1)


async def test_claims_that_cannot_be_used_change_nothing(tmp_path: Path) -> None:
    one, two = SharingBox(tmp_path, "one", OURS), SharingBox(tmp_path, "two", THEIRS, 5)
    await one.scale(4)
    await two.scale(1)
    (tmp_path / "node").chmod(0o777)
    await one.settle()
    assert not one.draining()
