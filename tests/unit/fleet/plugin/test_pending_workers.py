"""Each reason for which workers wait is reported once."""

from __future__ import annotations

from dynaplan.fleet.plugin.gpu_availability import NOT_READ
from dynaplan.fleet.plugin.pending_workers import REPORT_AFTER_S, PendingWorkers

TAKEN, RESERVED = "GPU 0: in use by another program", "GPU 0: reserved by alice"


def test_a_reason_is_reported_once_however_often_others_come_between() -> None:
    pending = PendingWorkers()
    reported: list[str] = []
    for second, why in enumerate((TAKEN, NOT_READ, TAKEN, RESERVED, f"GPU 0: {NOT_READ}", TAKEN, RESERVED)):
        reported += pending.update({"VllmWorker": why}, {}, second)
        assert pending.reasons == {"VllmWorker": why}
    waits = "VllmWorker: a worker waits for its GPUs"
    assert reported == [f"{waits}: {TAKEN}", f"{waits}: {RESERVED}"]


def test_a_reason_is_reported_again_when_the_worker_waits_again() -> None:
    pending = PendingWorkers()
    assert pending.update({"VllmWorker": TAKEN}, {}, 0.0)
    assert not pending.update({}, {}, 1.0)
    assert pending.update({"VllmWorker": TAKEN}, {}, 2.0)


def test_a_worker_whose_own_gpu_is_not_free_is_reported_after_a_while_by_the_reason_of_then() -> None:
    pending = PendingWorkers()
    assert not pending.update({}, {"w": "GPU 0: 70 of 80 GiB in use"}, 0.0)
    assert pending.overdue(REPORT_AFTER_S - 1) == frozenset()
    lines = pending.update({}, {"w": "GPU 0: 9 of 80 GiB in use"}, REPORT_AFTER_S)
    assert lines == ["w waits: GPU 0: 9 of 80 GiB in use"]
    assert pending.overdue(REPORT_AFTER_S) == {"w"}
    assert not pending.update({}, {"w": "GPU 0: 8 of 80 GiB in use"}, REPORT_AFTER_S + 1)
