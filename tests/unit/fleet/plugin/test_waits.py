"""What the user reads about workers that wait for GPUs."""

from __future__ import annotations

from dynaplan.fleet.plugin.gpu_memory import NOT_SEEN
from dynaplan.fleet.plugin.waits import TELL_AFTER_S, Waits


def test_a_service_without_a_free_gpu_is_told_once_whatever_the_gigabytes_do() -> None:
    waits = Waits()
    (line,) = waits.news({"VllmWorker": "GPU 1: 70 of 80 GB in use by pid 1"}, {}, 100.0)
    assert line == "VllmWorker: a worker waits for its GPUs: GPU 1: 70 of 80 GB in use by pid 1"
    assert waits.news({"VllmWorker": "GPU 1: 60 of 80 GB in use by pid 1"}, {}, 101.0) == []
    assert waits.reasons == {"VllmWorker": "GPU 1: 60 of 80 GB in use by pid 1"}
    assert len(waits.news({"VllmWorker": "GPU 1: 60 of 80 GB in use by pid 2"}, {}, 102.0)) == 1
    assert waits.news({}, {}, 103.0) == []
    assert len(waits.news({"VllmWorker": "GPU 1: 60 of 80 GB in use by pid 2"}, {}, 104.0)) == 1


def test_a_worker_whose_own_gpu_is_not_free_yet_is_told_when_that_takes_long() -> None:
    waits, why = Waits(), "GPU 1: 70 of 80 GB in use by pid 1"
    assert waits.news({}, {"ns_VllmWorker": why}, 100.0) == []
    assert waits.reasons == {"ns_VllmWorker": why}
    assert waits.news({}, {"ns_VllmWorker": "GPU 1: 70 of 80 GB in use by pid 2"}, 105.0) == []
    assert waits.news({}, {"ns_VllmWorker": why}, 100.0 + TELL_AFTER_S) == [f"ns_VllmWorker waits: {why}"]
    assert waits.news({}, {"ns_VllmWorker": why}, 101.0 + TELL_AFTER_S) == []


def test_a_gpu_that_is_only_looked_at_is_no_news() -> None:
    assert Waits().news({"VllmWorker": f"GPU 1: {NOT_SEEN}"}, {}, 100.0) == []
