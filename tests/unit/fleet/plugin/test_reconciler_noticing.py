"""Ends of workers are noticed whatever else is waited for, and written down before."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dynaplan.fleet.plugin import reconciler
from dynaplan.util.errors import ArbiterBusy
from tests.fakes.polling import eventually
from tests.unit.fleet.plugin.box import Box


async def test_a_worker_is_not_ready_from_the_first_look_after_its_end_on(tmp_path: Path) -> None:
    box = await Box(tmp_path).started()
    before = box.reconciler.workers["ns_VllmWorker"]
    box.circus.end("ns_VllmWorker")
    await box.reconciler.reconcile_once()
    [written] = [each for each in box.written if each.name == before.name]
    assert (written.state.value, written.pid, written.gpus) == ("starting", before.pid, before.gpus)
    box.reconciler.record_exit(before.pid, -9)
    await box.settle()
    assert box.states()["ns_VllmWorker"] == "ready"
    assert len(box.reconciler.workers["ns_VllmWorker"].restarts_s) == 1


async def test_a_look_that_failed_accuses_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = await Box(tmp_path).started()

    def none_more(pid: int) -> int | None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(box.processes, "identify", none_more)
        with pytest.raises(OSError, match="Too many"):
            await box.reconciler.reconcile_once()
    before = box.reconciler.workers
    await box.settle()
    assert box.reconciler.workers == before
    assert set(box.states().values()) == {"ready"}


async def test_ends_are_noticed_while_a_pass_waits_for_circus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "RESYNC_S", 0.01)
    box = await Box(tmp_path).started()
    stands_still = asyncio.Event()

    async def pid_of(name: str) -> int:
        stands_still.set()
        await asyncio.Event().wait()
        raise ArbiterBusy("circus did not answer")

    monkeypatch.setattr(box.circus, "pid", pid_of)
    box.reconciler.record_exit(box.circus.end("ns_PrefillWorker"), -9)
    running = asyncio.create_task(box.reconciler.run())
    await asyncio.wait_for(stands_still.wait(), 30)
    box.circus.end("ns_VllmWorker")
    await eventually(
        lambda: "ready" not in [each.state.value for each in box.written if each.name == "ns_VllmWorker"]
    )
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await eventually(lambda: asyncio.all_tasks() == {asyncio.current_task()})
