"""What the user reads about workers that wait for GPUs."""

from __future__ import annotations

from dynaplan.fleet.plugin.gpu_availability import NOT_READ
from dynaplan.fleet.plugin.pending_workers import REPORT_AFTER_S, PendingWorkers


def test_a_service_without_a_free_gpu_is_told_once_whatever_the_gigabytes_do() -> None:
    waits = PendingWorkers()
    (line,) = waits.update({"VllmWorker": "GPU 1: 70 of 80 GB in use by pid 1"}, {}, 100.0)
    assert line == "VllmWorker: a worker waits for its GPUs: GPU 1: 70 of 80 GB in use by pid 1"
    assert waits.update({"VllmWorker": "GPU 1: 60 of 80 GB in use by pid 1"}, {}, 101.0) == []
    assert waits.reasons == {"VllmWorker": "GPU 1: 60 of 80 GB in use by pid 1"}
    assert len(waits.update({"VllmWorker": "GPU 1: 60 of 80 GB in use by pid 2"}, {}, 102.0)) == 1
    assert waits.update({}, {}, 103.0) == []
    assert len(waits.update({"VllmWorker": "GPU 1: 60 of 80 GB in use by pid 2"}, {}, 104.0)) == 1


def test_a_worker_whose_own_gpu_is_not_free_yet_is_told_when_that_takes_long() -> None:
    waits, why = PendingWorkers(), "GPU 1: 70 of 80 GB in use by pid 1"
    assert waits.update({}, {"ns_VllmWorker": why}, 100.0) == []
    assert waits.reasons == {"ns_VllmWorker": why}
    assert waits.update({}, {"ns_VllmWorker": "GPU 1: 70 of 80 GB in use by pid 2"}, 105.0) == []
    assert waits.update({}, {"ns_VllmWorker": why}, 100.0 + REPORT_AFTER_S) == [f"ns_VllmWorker waits: {why}"]
    assert waits.update({}, {"ns_VllmWorker": why}, 101.0 + REPORT_AFTER_S) == []


def test_a_gpu_that_is_only_looked_at_is_no_news() -> None:
    assert PendingWorkers().update({"VllmWorker": f"GPU 1: {NOT_READ}"}, {}, 100.0) == []
