"""What stood beside what happened: engines that are not as their model says, and what is held against it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.backtesting.backtest import simulated_service
from dynaplan.planner.backtesting.intervals import Interval
from dynaplan.planner.backtesting.record import (
    DrawnWindow,
    ServedRecord,
    compare,
    hold_to_record,
    simulate_served,
)
from dynaplan.planner.backtesting.runs import Misses
from dynaplan.planner.backtesting.search import Search, run
from dynaplan.planner.model import Corrections, SplitRecord, WorkerLimits
from dynaplan.planner.rules.sla_policy import apply_corrections
from dynaplan.simulation.simulated_service import ServiceSettings
from tests.unit.planner.backtesting.windows import given_window
from tests.unit.planner.rules.targets import SETTINGS, model, traffic

ONE_EACH, TWO_AND_ONE = PoolSizes(1, 1), PoolSizes(2, 1)
LIMITS = WorkerLimits(8)
BOTH = (Role.PREFILL, Role.DECODE)
EXACT = Corrections()


def service(corrections: Corrections = EXACT, present: PoolSizes = ONE_EACH) -> ServiceSettings:
    return simulated_service(apply_corrections(model(), corrections, present), SETTINGS, LIMITS)


def window(
    truth: Corrections, requests_per_s: float = 6.0, stood: tuple[PoolSizes, ...] = (ONE_EACH,) * 6
) -> DrawnWindow:
    """As many intervals of 30 s as splits stood, as engines would serve them that are truly so slow."""
    count = round(30 * len(stood) * requests_per_s)
    requests = [TracedRequest(n / requests_per_s, 3000, 150) for n in range(count)]
    known = traffic(requests_per_s, interval_s=30.0)
    assert known.isl
    assert known.osl
    blank = [Interval(30.0, 30 * requests_per_s, (), known.isl, known.osl, serving=each) for each in stood]
    drawn = given_window(requests, 30.0)
    measured = simulate_served(service(truth, stood[0]), DrawnWindow(drawn, blank))
    intervals = [
        replace(
            each,
            answered=seen.osl.total if seen.osl else 0.0,
            ttft_ms=seen.ttft_ms or 0.0,
            itl_ms=seen.itl_ms or 0.0,
            late=seen.over_ttft[0][1],
            long=seen.over_itl[0][1],
        )
        for each, seen in zip(blank, measured, strict=True)
    ]
    return DrawnWindow(drawn, intervals)


@pytest.mark.parametrize("truth", [Corrections(2.0, 1.0), Corrections(1.0, 1.43), Corrections(0.7, 0.5)])
def test_the_factors_of_both_roles_are_those_with_which_what_stood_has_the_measured_times(
    truth: Corrections,
) -> None:
    found, stood = hold_to_record(service, window(truth), EXACT, BOTH)
    assert found.decode == pytest.approx(truth.decode, rel=0.05)
    assert found.prefill == pytest.approx(truth.prefill, rel=0.1)
    assert stood.ttft_shift == stood.itl_shift == 0


def test_a_backlog_is_no_slowness_where_the_model_has_it_too() -> None:
    overloaded = window(EXACT, requests_per_s=24.0)
    found, stood = hold_to_record(service, overloaded, EXACT, BOTH)
    assert found == EXACT
    assert stood.splits[0].late == stood.splits[0].foretold_late > 0


def test_workers_that_come_and_go_serve_in_the_record_when_they_served() -> None:
    came = window(EXACT, 16.0, (ONE_EACH,) * 5 + (TWO_AND_ONE,) * 5)
    found, stood = hold_to_record(service, came, EXACT, BOTH)
    assert found == EXACT
    assert [each.workers for each in stood.splits] == [TWO_AND_ONE, ONE_EACH]
    assert stood.of_standing(TWO_AND_ONE, 1.0) is None


def test_aggregated_workers_have_one_factor() -> None:
    stood = (PoolSizes(0, 1),) * 6

    def aggregated(corrections: Corrections) -> ServiceSettings:
        return service(corrections, stood[0])

    found, _ = hold_to_record(aggregated, window(Corrections(1.0, 1.6), 6.0, stood), EXACT, (Role.DECODE,))
    assert found.prefill == 1.0
    assert found.decode == pytest.approx(1.6, rel=0.05)


def test_a_role_that_is_not_fitted_keeps_its_factor() -> None:
    found, _ = hold_to_record(service, window(Corrections(2.0, 2.0)), EXACT, ())
    assert found == EXACT


# -- held to the record -----------------------------------------------------------------------------------


def compared(
    late: list[float], foretold: list[float], stood: tuple[PoolSizes, ...] = (ONE_EACH,) * 24
) -> ServedRecord:
    """Of 100 requests in each interval that many missed the TTFT, and were foretold to."""
    known = traffic(10.0)
    assert known.isl
    assert known.osl
    intervals = [
        Interval(10.0, 100.0, (), known.isl, known.osl, serving=workers, late=each, long=0.0)
        for each, workers in zip(late, stood, strict=True)
    ]
    simulated = [replace(known, over_ttft=((500.0, each),), over_itl=((20.0, 0.0),)) for each in foretold]
    times = [TracedRequest(10.0 * number, 1, 1) for number in range(len(late))]
    return compare(DrawnWindow(given_window(times), intervals), simulated)


def test_more_misses_than_foretold_are_held_against_every_split_by_their_odds() -> None:
    stood = compared([20.0] * 24, [2.0] * 24)
    assert stood.held(TWO_AND_ONE, 1000, Misses(20, 0, 20)) == pytest.approx(200, rel=0.05)
    assert 50 < stood.held(TWO_AND_ONE, 1000, Misses(5, 0, 5)) < 70
    assert stood.held(TWO_AND_ONE, 1000, Misses(0, 20, 20)) == pytest.approx(
        20
    )  # of the ITL as many missed as were foretold


def test_what_one_split_missed_is_held_against_it_and_those_with_no_more_workers() -> None:
    late = [0.0] * 12 + [60.0] * 12
    stood = compared(late, [0.0] * 24, (TWO_AND_ONE,) * 12 + (ONE_EACH,) * 12)
    nobody = Misses(0, 0, 0)
    assert stood.held(ONE_EACH, 1000, nobody) == pytest.approx(600)
    assert stood.held(TWO_AND_ONE, 1000, nobody) == 0
    foretold = compared(late, late, (TWO_AND_ONE,) * 12 + (ONE_EACH,) * 12)
    assert foretold.held(ONE_EACH, 1000, nobody) == 0


def test_as_many_misses_within_chance_and_fewer_than_foretold_are_held_against_nobody() -> None:
    for late, foretold in (([5.0] * 24, [4.5] * 24), ([2.0] * 24, [20.0] * 24)):
        assert compared(late, foretold).held(ONE_EACH, 1000, Misses(20, 0, 20)) == pytest.approx(20)


def test_misses_that_come_together_are_chance_where_as_many_single_ones_are_not() -> None:
    single = compared([15.0] * 24, [5.0] * 24)
    together = compared([100.0, 100.0, 40.0, *[5.0] * 21], [5.0] * 24)
    assert single.ttft_shift > 0
    assert together.ttft_shift == 0


def test_requests_that_are_not_streamed_are_neither_kept_nor_missed() -> None:
    """A quarter is streamed, of which as many miss as the model foretells of all, in a backlog too."""
    known = window(EXACT, requests_per_s=24.0)
    replayed = simulate_served(service(), known)
    quarter = [
        replace(each, first_tokens=(seen.first_tokens or 0.0) / 4, late=(each.late or 0.0) / 4)
        for each, seen in zip(known.intervals, replayed, strict=True)
    ]
    stood = compare(DrawnWindow(known.drawn, quarter), replayed)
    [record] = stood.splits
    assert record.requests == pytest.approx(sum(each.requests for each in quarter[1:]) / 4)
    assert record.late == pytest.approx(record.foretold_late, rel=0.01)
    assert stood.ttft_shift == 0


def test_the_record_of_few_requests_does_not_stand_in_place_of_a_simulation() -> None:
    known = window(EXACT, requests_per_s=24.0)
    unseen = [replace(each, first_tokens=0.0, late=0.0, long=0.0) for each in known.intervals]
    stood = compare(DrawnWindow(known.drawn, unseen), simulate_served(service(), known))
    simulated = run(Search(service(), known.drawn, 0.05, ONE_EACH, LIMITS), ONE_EACH)
    beside = run(Search(service(), known.drawn, 0.05, ONE_EACH, LIMITS, record=stood), ONE_EACH)
    assert not simulated.is_kept
    assert beside == simulated


def test_a_split_that_stood_at_the_windows_end_alone_did_not_stand_all_the_time() -> None:
    known = window(EXACT, stood=(ONE_EACH,) * 5 + (TWO_AND_ONE,))
    lives = [replace(each, ttft_ms=140_000.0) for each in known.intervals]
    stood = compare(DrawnWindow(known.drawn, lives), simulate_served(service(), known))
    assert [each.workers for each in stood.splits] == [TWO_AND_ONE]
    assert stood.of_standing(TWO_AND_ONE, 1.0) is None


def test_what_stood_before_a_worker_came_must_have_kept_it_beyond_chance_too() -> None:
    record = SplitRecord(ONE_EACH, 60.0, 2.0, 0.0, 2.0, 0.0)
    stood = ServedRecord((record,), record)
    requests = [TracedRequest(float(second), 3000, 150) for second in range(60)]
    for present, is_kept in ((ONE_EACH, True), (TWO_AND_ONE, False)):
        search = Search(service(), given_window(requests), 0.05, present, LIMITS, record=stood)
        assert run(search, ONE_EACH).is_kept is is_kept


def test_what_frontends_do_not_count_is_not_compared() -> None:
    known = window(EXACT)
    uncounted = [replace(each, late=None) for each in known.intervals]
    assert compare(DrawnWindow(known.drawn, uncounted), simulate_served(service(), known)) == ServedRecord()


def test_of_a_split_that_stood_all_the_time_what_was_measured_counts() -> None:
    record = SplitRecord(ONE_EACH, 1000.0, 190.0, 10.0, 20.0, 10.0)
    requests = [TracedRequest(float(second), 3000, 150) for second in range(60)]
    stood = ServedRecord((record,), record)
    search = Search(service(), given_window(requests), 0.05, ONE_EACH, LIMITS, record=stood)
    assert run(search, ONE_EACH).in_time == pytest.approx(0.81)
    assert not run(search, ONE_EACH).is_kept
    assert run(search, TWO_AND_ONE).is_kept
