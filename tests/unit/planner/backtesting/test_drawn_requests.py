"""Measured traffic as requests again, and the same ones in every window that has an interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.contract.traffic import Lengths
from dynaplan.engines.timing_model.engine_model import EngineSettings
from dynaplan.planner.backtesting.drawn_requests import draw_window
from dynaplan.planner.backtesting.evidence import Evidence
from dynaplan.planner.backtesting.intervals import Interval
from tests.unit.planner.rules.targets import traffic

TOKENS = Lengths.fixed(100.0)
CONTEXT = 16_384
ENGINE = EngineSettings(1000, 16, CONTEXT)
MIXED = Lengths((100.0, 1000.0), (30.0, 10.0, 0.0), 200.0)


def interval(requests: float, **changes: object) -> Interval:
    return replace(Interval(30.0, requests, (), TOKENS, TOKENS), **changes)  # type: ignore[arg-type]


def requests_of(intervals: Sequence[Interval]) -> list[TracedRequest]:
    return [request for each in draw_window(intervals, ENGINE) for request in each.requests]


def test_as_many_requests_as_arrived_come_when_they_arrived() -> None:
    bursty = interval(12, arrivals=(10.0, 0.0, 2.0))
    times_s = [each.arrival_s for each in requests_of([bursty, interval(3)])]
    assert times_s == sorted(times_s)
    came = [sum(low <= each < low + 10 for each in times_s) for low in (0, 10, 20)]
    assert came == [10, 0, 2]
    assert sum(each >= 30 for each in times_s) == 3


def test_parts_of_requests_add_up() -> None:
    assert len(requests_of([interval(0.4)] * 10)) == 4


def test_lengths_have_the_measured_mean_in_any_stretch() -> None:
    requests = requests_of([interval(40, isl=MIXED)] * 10)
    for begin in range(0, 400, 100):
        tokens = [each.prompt_tokens for each in requests[begin : begin + 100]]
        assert sum(tokens) / len(tokens) == pytest.approx(200.0, rel=0.05)


def test_the_cached_part_of_prompts_is_a_prefix_that_all_share() -> None:
    one, other = requests_of([interval(2, isl=Lengths.fixed(320.0), hit_rate=0.5)])
    assert one.block_hashes == other.block_hashes == tuple(range(10))
    assert not any(each.block_hashes for each in requests_of([interval(3)]))


def test_no_request_exceeds_the_context() -> None:
    long = interval(20, isl=Lengths((20_000.0, 40_000.0), (0.0, 1.0, 0.0)), osl=Lengths.fixed(500.0))
    for each in requests_of([long]):
        assert each.prompt_tokens + each.output_tokens <= CONTEXT
        assert each.output_tokens >= 1


def test_windows_that_share_settled_intervals_have_the_same_requests_there() -> None:
    evidence, windows = Evidence(300.0), []
    for number in range(40):
        evidence.add(traffic(1.0 + number % 7 / 3, interval_s=30.0), None, None)
        windows.append(draw_window(evidence.intervals, ENGINE))
    before, after = windows[-3:-1]
    shared = {each.identity: each.requests for each in before if each.is_settled}
    again = [each for each in after if each.identity in shared]
    assert (len(shared), len(again)) == (9, 8)
    assert [each.requests for each in again[1:]] == [shared[each.identity] for each in again[1:]]


def test_the_count_is_known_before_requests_are_drawn() -> None:
    evidence = Evidence(300.0)
    for number in range(9):
        evidence.add(traffic(number / 7, interval_s=30.0), None, None)
    window = draw_window(evidence.intervals, ENGINE)
    assert [len(each.requests) for each in window] == [each.count for each in window]


def test_an_interval_in_which_answers_may_still_run_is_not_settled() -> None:
    long = [interval(30, osl=Lengths.fixed(3000.0), answered=30, itl_ms=20.0) for _ in range(6)]
    assert [each.is_settled for each in draw_window(long, ENGINE)] == [True] * 3 + [False] * 3
