"""What was lived: counted misses say nothing of the number of workers while older ones have more to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.fleet.counts import Targets
from dynaplan.planner.bursts.evidence import Counted
from dynaplan.planner.bursts.lived import lived_through
from dynaplan.planner.bursts.memory import Hedge, Lived
from tests.unit.planner.bursts.test_experts import AGGREGATED, PROMISE, SERVICE, came

BURST, CALM = [60.0] * 30, [1.0] * 30


def hedge_after(served: Targets, *, counted: bool = True, lived: Lived | None = None) -> Hedge:
    """The hedge after a burst that so many workers served."""
    hedge = Hedge(followed=(served,), lived=lived or Lived())
    return replace(hedge, lived=passed(hedge, BURST, served, counted=counted)[0])


def passed(
    hedge: Hedge, arrivals: list[float], served: Targets, *, counted: bool = True
) -> tuple[Lived, Counted | None]:
    """What was lived after these arrivals, and which of the counted misses are evidence."""
    service = SERVICE if served.prefill else AGGREGATED
    misses = Counted(served, 10.0, 5.0) if counted else None
    interval = replace(came(arrivals, service=service), served=served, counted=misses)
    lived, after = lived_through(hedge, interval, PROMISE, 1.0)
    return lived, after.counted


def intervals_without_evidence(before: Targets, served: Targets) -> int:
    """The quiet intervals after a burst, then served by other workers, that are no evidence."""
    hedge = hedge_after(before)
    for number in range(100):
        lived, counted = passed(hedge, CALM, served)
        if counted:
            return number
        assert (lived.late, lived.long) == (10.0, 5.0), "what the burst itself counted, and no more"
        hedge = replace(hedge, lived=lived)
    raise AssertionError("never")


def test_prompts_stay_in_the_queue_of_the_aggregated_worker_that_they_entered() -> None:
    few, many = (intervals_without_evidence(Targets(0, number), Targets(0, 8)) for number in (1, 4))
    assert few > many
    assert intervals_without_evidence(Targets(0, 4), Targets(0, 4)) == 0


def test_a_prefill_queue_belongs_to_all_workers() -> None:
    assert intervals_without_evidence(Targets(1, 4), Targets(8, 4)) == 0


def test_answers_stay_with_the_decode_worker_that_has_them_beside_a_queue_that_belongs_to_all() -> None:
    lived, counted = passed(hedge_after(Targets(2, 1)), CALM[:2], Targets(2, 8))
    assert counted is None
    assert lived.older.workers == Targets(2, 1)
    assert lived.older.decoding.total > lived.trial.decoding.total / 8
    assert lived.older.queue == lived.trial.queue > 0


def test_of_several_additions_the_busiest_workers_count() -> None:
    """One worker met the burst, a second its end: when six more come, the first is the one to wait for."""
    hedge = hedge_after(Targets(0, 1))
    hedge = replace(hedge, lived=passed(hedge, CALM, Targets(0, 2))[0])
    lived, counted = passed(hedge, CALM, Targets(0, 8))
    assert counted is None
    assert lived.older.workers == Targets(0, 1)


def test_older_workers_are_forgotten_once_all_are_alike_or_nothing_came_or_nobody_served() -> None:
    hedge = hedge_after(Targets(0, 1))
    uneven, _ = passed(hedge, CALM, Targets(0, 8))
    assert uneven.older.workers.decode == 1
    idle = replace(came(CALM, service=AGGREGATED), requests=0.0, work=None, served=Targets(0, 8))
    quiet, _ = lived_through(replace(hedge, lived=uneven), idle, PROMISE, 1.0)
    assert quiet.older.workers.decode == 0
    nobody, _ = lived_through(hedge, replace(idle, served=Targets()), PROMISE, 1.0)
    assert nobody == Lived()


@pytest.mark.parametrize("served", [Targets(0, 2), Targets(1, 2)])
def test_counted_misses_are_remembered_with_what_the_fluid_makes_of_the_same_workers(served: Targets) -> None:
    lived = hedge_after(served).lived
    assert (lived.late, lived.long) == (10.0, 5.0)
    assert lived.trial.workers == served
    assert hedge_after(served, counted=False).lived.late == 0


def test_what_a_burst_has_left_is_not_worked_off_by_workers_of_which_it_is_not_known_when_they_came() -> None:
    hedge = hedge_after(Targets(1, 4))
    changed, _ = passed(hedge, CALM, Targets(8, 4), counted=False)
    same, _ = passed(hedge, CALM, Targets(1, 4))
    assert changed.trial.queue == same.trial.queue > 100
    assert changed.trial.workers == Targets(8, 4)
    after, _ = passed(replace(hedge, lived=changed), CALM, Targets(8, 4))
    assert after.trial.queue == 0
