"""Waiting for numbers of workers says "carried out" only when they are, and gives up with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dynaplan.contract.store_keys import planner_prefix
from dynaplan.fleet import scale_progress
from dynaplan.fleet.scale_progress import ScaleRequest, measure_progress, wait_carried_out
from dynaplan.graph.lifecycle import Role, Worker
from dynaplan.process.heartbeats import PLUGIN_HEARTBEAT, Heartbeat, HeartbeatFiles
from dynaplan.process.identity import ProcessIdentity
from dynaplan.store.memory import MemoryStore
from dynaplan.util.errors import DeploymentError, DynaplanError, PermanentError, TemporaryError
from tests.fakes.clock import LoopClock
from tests.unit.fleet.rules.graphs import BACKOFF, DRAINING, FAILED, STARTING, worker

ONE, TWO = worker("VllmWorker"), worker("VllmWorker_1")


class Box:
    """A deployment whose workers, acknowledgement and heartbeats are in the hands of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.workers: tuple[Worker, ...] = ()
        self.is_alive, self.plugin_silent_s = True, 0.0
        self.store = MemoryStore(LoopClock())
        processes = SimpleNamespace(is_alive=lambda _: self.is_alive)
        monkeypatch.setattr(scale_progress, "process_table", processes)
        monkeypatch.setattr(HeartbeatFiles, "of", lambda _: SimpleNamespace(read=self.heartbeat))
        statefile = SimpleNamespace(read=lambda: {"any": "document"})
        monkeypatch.setattr(scale_progress, "StatefileStore", lambda _: statefile)
        monkeypatch.setattr(scale_progress, "fleet_of", lambda _: self.workers)
        monkeypatch.setattr(scale_progress, "PROGRESS_POLL_S", 0.001)

    def heartbeat(self, name: str) -> Heartbeat | None:
        silent_s = self.plugin_silent_s if name == PLUGIN_HEARTBEAT else 0.0
        return Heartbeat(ProcessIdentity(7, 1, "boot"), 0.0, silent_s, 1.0, True)

    async def wait(
        self, acknowledged: int = 3, timeout_s: float = 0.0, *, is_for_others: bool = False, **keys: int
    ) -> bool:
        counts = {"num_decode_workers": 2, "decision_id": 3, "scaled_decision_id": acknowledged, **keys}
        for name, value in counts.items():
            await self.store.put(planner_prefix("ns") + name, str(value))
        arbiter = ProcessIdentity(5, 1, "boot")
        found = SimpleNamespace(namespace="ns", arbiter=arbiter, runtime_dir=Path("/x"), statefile=Path("/y"))
        request = ScaleRequest(3, {Role.DECODE: 2}, is_for_others)
        await wait_carried_out(cast(Any, found), self.store, request, timeout_s)
        return True

    async def refusal(self, kind: type[DynaplanError], **keys: int) -> str:
        with pytest.raises(kind) as raised:
            await self.wait(**keys)
        return str(raised.value)


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Box:
    return Box(monkeypatch)


async def test_it_returns_when_the_decision_is_acknowledged_and_the_numbers_are_so(box: Box) -> None:
    box.workers = (ONE, TWO)
    assert await box.wait()


@pytest.mark.parametrize(
    ("workers", "missing"),
    [
        ((ONE, replace(TWO, state=STARTING)), "1 of 2 decode workers ready, dynamo_VllmWorker_1 starting"),
        ((ONE, TWO, worker("VllmWorker_2", DRAINING, (2,))), "VllmWorker_2 draining, with GPU 2"),
    ],
)
async def test_after_its_time_it_tells_what_is_missing(
    box: Box, workers: tuple[Worker, ...], missing: str
) -> None:
    box.workers = workers
    assert missing in await box.refusal(TemporaryError)


async def test_an_acknowledgement_that_is_late_is_waited_for(box: Box) -> None:
    box.workers = (ONE, TWO)
    assert "not acknowledged" in await box.refusal(TemporaryError, acknowledged=2)


async def test_workers_that_failed_are_told_with_their_reason_and_the_way_to_try_again(box: Box) -> None:
    box.workers = (ONE, replace(TWO, state=FAILED, reason="exit code 1"))
    told = await box.refusal(PermanentError)
    assert "1 of 2 decode workers ready" in told
    assert "dynamo_VllmWorker_1 has failed: exit code 1" in told
    assert "`dynaplan scale decode=2` tries again" in told


async def test_a_later_decision_for_other_numbers_ends_the_waiting_and_one_for_the_same_does_not(
    box: Box,
) -> None:
    box.workers = (ONE,)
    told = await box.refusal(PermanentError, decision_id=4, num_decode_workers=1)
    assert "overtaken by decision 4: decode=1" in told
    box.workers = (ONE, TWO)
    assert await box.wait(acknowledged=4, decision_id=4)


async def test_it_gives_up_with_a_sentence_when_the_plugin_or_serve_is_silent_or_gone(box: Box) -> None:
    box.plugin_silent_s = 50.0
    assert "the fleet plugin (pid 7) has not answered for 50 s" in await box.refusal(PermanentError)
    box.is_alive = False
    assert "has ended" in await box.refusal(DeploymentError)


async def test_a_store_that_is_away_is_asked_again(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    from dynaplan.util.errors import StoreUnavailable

    box.workers = (ONE, TWO)
    listed: Callable[[str], Any] = box.store.list
    answers = iter((False, True))

    async def listing(prefix: str) -> Any:
        if next(answers, True):
            return await listed(prefix)
        raise StoreUnavailable("away")

    monkeypatch.setattr(box.store, "list", listing)
    assert await box.wait(timeout_s=5.0)


async def test_of_what_a_program_of_the_users_carries_out_only_its_acknowledgement_counts(box: Box) -> None:
    box.workers = (ONE,)
    assert await box.wait(is_for_others=True)
    with pytest.raises(TemporaryError, match="not acknowledged"):
        await box.wait(acknowledged=2, is_for_others=True)


ONE_ASKED, TWO_ASKED = worker("VllmWorker"), worker("VllmWorker_1")


def test_carried_out_is_the_wanted_number_ready_and_nobody_else() -> None:
    assert measure_progress({Role.DECODE: 2}, (ONE_ASKED, TWO_ASKED)).is_carried_out
    assert measure_progress({Role.DECODE: 0}, ()).is_carried_out
    assert not measure_progress({Role.DECODE: 1}, (ONE_ASKED, TWO_ASKED)).is_carried_out


def test_a_role_that_was_not_asked_for_is_no_matter() -> None:
    assert measure_progress({Role.DECODE: 1}, (ONE_ASKED, worker("PrefillWorker", STARTING))).is_carried_out


def test_a_drained_worker_with_a_process_is_in_the_way_and_its_gpus_are_named() -> None:
    for gpus, words in (((3, 4), "draining, with GPU 3,4"), ((), "draining")):
        progress = measure_progress({Role.DECODE: 1}, (ONE_ASKED, worker("VllmWorker_1", DRAINING, gpus)))
        assert progress.missing == (f"1 of 1 decode workers ready, dynamo_VllmWorker_1 {words}",)
        assert not progress.is_settled


def test_when_only_failed_workers_are_in_the_way_it_is_settled_and_not_carried_out() -> None:
    failed = worker("VllmWorker_1", FAILED)
    progress = measure_progress({Role.DECODE: 2}, (ONE_ASKED, failed))
    assert (progress.is_carried_out, progress.is_settled, progress.failed) == (False, True, (failed,))


def test_a_start_or_a_restart_under_way_may_still_succeed() -> None:
    for state in (STARTING, BACKOFF):
        assert not measure_progress({Role.DECODE: 2}, (ONE_ASKED, worker("VllmWorker_1", state))).is_settled


def test_a_worker_that_waits_for_its_gpus_is_not_settled() -> None:
    progress = measure_progress({Role.DECODE: 2}, (ONE_ASKED,))
    assert progress.missing == ("1 of 2 decode workers ready",)
    assert not progress.is_settled
