"""What is carried out of a wish for numbers of workers, and what is in its way."""

from __future__ import annotations

from dynaplan.fleet.scale_progress import scale_progress
from dynaplan.graph.lifecycle import Role
from tests.unit.fleet.rules.graphs import BACKOFF, DRAINING, FAILED, STARTING, worker

ONE, TWO = worker("VllmWorker"), worker("VllmWorker_1")


def test_carried_out_is_the_wanted_number_ready_and_nobody_else() -> None:
    assert scale_progress({Role.DECODE: 2}, (ONE, TWO)).is_carried_out
    assert scale_progress({Role.DECODE: 0}, ()).is_carried_out
    assert not scale_progress({Role.DECODE: 1}, (ONE, TWO)).is_carried_out


def test_a_role_that_was_not_asked_for_is_no_matter() -> None:
    assert scale_progress({Role.DECODE: 1}, (ONE, worker("PrefillWorker", STARTING))).is_carried_out


def test_a_drained_worker_with_a_process_is_in_the_way_and_its_gpus_are_named() -> None:
    for gpus, words in (((3, 4), "draining, with GPU 3,4"), ((), "draining")):
        progress = scale_progress({Role.DECODE: 1}, (ONE, worker("VllmWorker_1", DRAINING, gpus)))
        assert progress.missing == (f"1 of 1 decode workers ready, dynamo_VllmWorker_1 {words}",)
        assert not progress.is_settled


def test_when_only_failed_workers_are_in_the_way_it_is_settled_and_not_carried_out() -> None:
    failed = worker("VllmWorker_1", FAILED)
    progress = scale_progress({Role.DECODE: 2}, (ONE, failed))
    assert (progress.is_carried_out, progress.is_settled, progress.failed) == (False, True, (failed,))


def test_a_start_or_a_restart_under_way_may_still_succeed() -> None:
    for state in (STARTING, BACKOFF):
        assert not scale_progress({Role.DECODE: 2}, (ONE, worker("VllmWorker_1", state))).is_settled


def test_a_worker_that_waits_for_its_gpus_is_not_settled() -> None:
    progress = scale_progress({Role.DECODE: 2}, (ONE,))
    assert progress.missing == ("1 of 2 decode workers ready",)
    assert not progress.is_settled
