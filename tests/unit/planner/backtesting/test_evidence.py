"""Measured traffic as requests again, and the present load beside it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dynaplan.contract.traffic import Lengths, Traffic
from dynaplan.planner.backtesting.evidence import (
    Evidence,
    load_change,
    peak_part,
)
from dynaplan.planner.backtesting.intervals import Interval
from dynaplan.planner.model import LOAD_ABOVE, LOAD_BELOW, LOAD_WITHIN
from tests.unit.planner.rules.targets import traffic

TOKENS = Lengths.fixed(100.0)
MIXED = Lengths((100.0, 1000.0), (30.0, 10.0, 0.0), 200.0)


def interval(requests: float, **changes: object) -> Interval:
    return replace(Interval(30.0, requests, (), TOKENS, TOKENS), **changes)  # type: ignore[arg-type]


def test_what_is_older_than_the_window_is_dropped() -> None:
    evidence = Evidence(60.0)
    dropped = [evidence.add(traffic(1.0, interval_s=30.0), None, None) for _ in range(4)]
    assert dropped == [0, 0, 1, 1]
    assert evidence.span_s == 60.0
    assert evidence.requests == 60.0


def test_an_interval_without_data_or_before_any_length_is_known_is_no_evidence() -> None:
    evidence = Evidence(60.0)
    evidence.add(Traffic(30.0, missing="no frontend answered"), TOKENS, TOKENS)
    evidence.add(Traffic(30.0, 5.0), None, None)
    assert evidence.intervals == ()


def test_an_interval_without_requests_is_evidence_whatever_lengths_are_known() -> None:
    evidence = Evidence(60.0)
    evidence.add(Traffic(30.0, 0.0), None, None)
    assert [each.requests for each in evidence.intervals] == [0.0]


def test_few_answers_have_the_recent_lengths_and_many_have_their_own() -> None:
    evidence = Evidence(60.0)
    few = Lengths((100.0,), (5.0, 0.0), 50.0)
    evidence.add(Traffic(30.0, 5.0, isl=few, osl=few), MIXED, None)
    evidence.add(traffic(10.0), MIXED, MIXED)
    first, second = evidence.intervals
    assert (first.isl, first.osl) == (MIXED, few)
    assert second.isl.mean_tokens == 3000


# -- the present load ----------------------------------------------------------------------------------

STEADY = [interval(100)] * 40


def change(later: list[Interval], coming: float, before: list[Interval] = STEADY) -> str:
    return load_change([*before, *later], coming, len(before))


def test_a_load_as_before_is_within() -> None:
    assert change([interval(110)], 105.0) == LOAD_WITHIN


def test_a_doubling_is_above_when_its_first_interval_ends_and_so_is_its_forecast() -> None:
    assert change([interval(200)], 200.0) == LOAD_ABOVE
    assert change([interval(110)], 200.0) == LOAD_ABOVE


def test_longer_prompts_are_more_work() -> None:
    assert change([interval(100, isl=Lengths.fixed(200.0))], 100.0) == LOAD_ABOVE


def test_a_burst_as_before_is_within_and_one_that_lasts_longer_is_above() -> None:
    bursty = [interval(200 if number % 10 == 0 else 10) for number in range(40)]
    assert change([interval(200)], 10.0, bursty) == LOAD_WITHIN
    assert change([interval(200)], 200.0, bursty) == LOAD_ABOVE


def test_a_load_that_ends_is_below_after_two_intervals() -> None:
    assert change([interval(0)], 0.0) == LOAD_WITHIN
    assert change([interval(0)] * 2, 0.0) == LOAD_BELOW


def test_a_pause_as_before_is_within() -> None:
    paused = [interval(0 if number % 10 > 6 else 100) for number in range(60)]
    assert change([interval(0)] * 3, 0.0, paused) == LOAD_WITHIN


def test_before_the_first_answer_and_in_its_interval_nothing_is_compared() -> None:
    assert load_change(STEADY, 1e6, 0) == LOAD_WITHIN
    assert load_change(STEADY, 1e6, len(STEADY)) == LOAD_WITHIN


# -- what can come of the peak ---------------------------------------------------------------------------

REACTION = 4
WAVE = [interval(100 + 80 * math.sin(number * math.tau / 40)) for number in range(120)]


def part(intervals: list[Interval], known: int | None = None) -> float:
    return peak_part(intervals, known or len(intervals), REACTION)


def test_a_steady_load_may_be_at_its_peak() -> None:
    assert part(STEADY) == 1.0


def test_at_the_trough_of_a_slow_wave_its_peak_cannot_come_in_time() -> None:
    trough, crest = WAVE[:111], WAVE[:91]
    assert part(trough) == pytest.approx(0.4, abs=0.05)
    assert part(crest) == 1.0


def test_of_a_load_that_jumps_its_peak_may_come_any_time_and_so_it_may_of_one_that_only_fell() -> None:
    assert part([interval(200 if number % 20 < 3 else 10) for number in range(59)]) == 1.0
    assert part([*[interval(200)] * 20, *[interval(10)] * 20]) == 1.0
    assert (
        part([*[interval(200 if number % 20 < 3 else 10) for number in range(59)], *[interval(0)] * 2], 59)
        == 1.0
    )


def test_fewer_requests_whose_prompts_are_as_much_longer_are_as_much_work() -> None:
    fewer = range(100, 40, -1)
    assert part([interval(requests) for requests in fewer]) < 0.6
    assert part([interval(requests, isl=Lengths.fixed(10_000 / requests)) for requests in fewer]) == 1.0


def test_too_few_intervals_say_nothing_of_how_fast_a_load_changes() -> None:
    falling = [interval(200 - 5 * number) for number in range(10)]
    assert part(falling, 2 * REACTION) == 1.0
    assert part(falling, 2 * REACTION + 1) < 1.0
