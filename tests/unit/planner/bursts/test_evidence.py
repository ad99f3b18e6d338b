"""What an expert is held to have missed, by the fluid and by what was counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.fleet.counts import Targets
from dynaplan.planner.bursts.evidence import Counted, Served, late_by_evidence, long_by_evidence, ratio
from dynaplan.planner.bursts.experts import ExpertPanel, tried
from dynaplan.planner.bursts.memory import Decoding, ExpertTrial, Hedge, Lived, Missed
from dynaplan.planner.model import WorkerLimits
from tests.unit.planner.bursts.test_experts import ALONE, PROMISE, after, came, trial

SERVED = Targets(3, 2)
CAME = Counted(SERVED, 40.0, 20.0)
AT_REST = ExpertTrial()
LIVED = Lived()


def having(prefill: int, decode: int) -> Served:
    return Served(Targets(prefill, decode), Targets(prefill, decode))


def test_the_fluid_is_believed_until_more_was_counted_than_one_burst() -> None:
    assert ratio(Missed(), 100.0) == 1.0
    assert ratio(Missed(100.0, 100.0**2), 300.0) == pytest.approx(2.0)
    ten_bursts = Missed(1000.0, 10 * 100.0**2)
    assert ratio(ten_bursts, 3000.0) == pytest.approx(1 + 2 * 10 / 11)
    assert ratio(ten_bursts, 0.0) == pytest.approx(1 / 11)
    assert ratio(Missed(100.0, 0.0, 100.0), 300.0) == pytest.approx(2.0)


def test_a_fraction_of_a_request_is_no_measure_of_what_was_counted() -> None:
    for fraction in (1e-9, 1e-6, 1e-3):
        assert ratio(Missed(fraction, fraction**2), 300.0) < 1.4


def test_the_very_workers_that_served_missed_what_was_counted() -> None:
    for fluid in (0.0, 1000.0):
        assert late_by_evidence(fluid, having(3, 2), AT_REST, LIVED, CAME) == 40
        assert long_by_evidence(fluid, having(3, 2), AT_REST, LIVED, CAME) == 20


@pytest.mark.parametrize(
    ("workers", "late", "long"),
    [
        ((2, 2), (40, 1000), (0, 20)),
        ((3, 1), (40, 1000), (20, 1000)),
        ((4, 2), (0, 40), (20, 1000)),
        ((3, 3), (0, 40), (0, 20)),
        ((2, 3), (0, 1000), (0, 20)),
        ((4, 1), (0, 1000), (20, 1000)),
    ],
)
def test_more_workers_miss_no_more_and_fewer_no_less(
    workers: tuple[int, int], late: tuple[float, float], long: tuple[float, float]
) -> None:
    """Of the TTFT in both roles; prompts that are computed later come to decode more evenly."""
    had = having(*workers)
    for fluid, bound in zip((0.0, 1000.0), late, strict=True):
        assert late_by_evidence(fluid, had, AT_REST, LIVED, CAME) == bound
    for fluid, bound in zip((0.0, 1000.0), long, strict=True):
        assert long_by_evidence(fluid, had, AT_REST, LIVED, CAME) == bound


def test_a_queue_that_an_expert_would_not_have_had_is_not_held_against_it() -> None:
    left_over = Lived(ExpertTrial(queue=50.0, decoding=Decoding((50.0,), (10.0,))))
    assert late_by_evidence(0.0, having(3, 2), AT_REST, left_over, CAME) == 0
    assert long_by_evidence(0.0, having(3, 2), AT_REST, left_over, CAME) == 0
    owing = ExpertTrial(queue=50.0, decoding=Decoding((50.0,), (10.0,)))
    assert late_by_evidence(1000.0, having(3, 2), owing, LIVED, CAME) == 1000
    assert long_by_evidence(1000.0, having(3, 2), owing, LIVED, CAME) == 1000


def test_an_expert_whose_workers_came_in_between_is_held_to_neither_bound() -> None:
    grown = Served(Targets(2, 2), Targets(4, 2))
    assert late_by_evidence(0.0, grown, AT_REST, LIVED, CAME) == 0
    assert late_by_evidence(1000.0, grown, AT_REST, LIVED, CAME) == 1000


PANEL = ExpertPanel(WorkerLimits(), is_aggregated=False)
STILL = Hedge(followed=(ALONE,), most=Targets(8, 8))
BURST = came([20.0] * 30)


def lived_through(hedge: Hedge, counted: Counted | None, served: Targets = ALONE) -> Hedge:
    return tried(hedge, PANEL, replace(BURST, served=served, counted=counted), PROMISE, 1.0)


def test_the_workers_that_served_are_judged_by_what_was_counted_and_the_others_by_its_ratio() -> None:
    unseen = after([BURST])
    found = lived_through(STILL, Counted(ALONE, 500.0, 30.0))
    assert trial(found, ALONE).late.requests == 500
    assert trial(found, ALONE).long.requests == 30
    assert trial(found, Targets(8 - 1, 1)).long.requests >= 30
    assert found.lived.late == 500
    assert found.lived.trial.late == trial(unseen, ALONE).late

    better = replace(STILL, lived=Lived(ExpertTrial(late=Missed(100.0, 100.0)), 300.0))
    two = trial(lived_through(better, Counted(Targets(2, 2), 0.0, 0.0), Targets(2, 2)), Targets(1, 2))
    plain = trial(unseen, Targets(1, 2))
    assert two.late.requests == pytest.approx(min(600.0, plain.late.requests * 300 / 100), rel=0.05)


def test_nobody_is_held_to_more_misses_than_requests_came() -> None:
    found = lived_through(STILL, Counted(ALONE, 590.0, 10.0))
    assert all(each.late.requests + each.long.requests <= 600 + 1e-6 for each in found.trials)


def test_an_interval_in_which_workers_changed_is_no_evidence_and_its_queue_is_carried_on() -> None:
    found = lived_through(STILL, None)
    assert trial(found, ALONE) == trial(after([BURST]), ALONE)
    assert (found.lived.late, found.lived.trial.late) == (0.0, Missed())
    assert found.lived.trial.queue == trial(found, ALONE).queue > 0
    assert lived_through(found, None, Targets()).lived == Lived()
