"""Lengths of what arrived, from those of what ended and from what still runs."""

from __future__ import annotations

import math

import pytest

from dynaplan.contract.traffic import Lengths
from dynaplan.planner.backtesting.arrived_lengths import Weights, arrived_lengths, product_limit
from dynaplan.planner.backtesting.intervals import Interval

PROMPT = Lengths.fixed(1000.0)


def interval(requests: float, answered: float, osl_tokens: float) -> Interval:
    """Half a minute in which a token takes 30 ms, so that an answer of 1000 tokens takes one interval."""
    osl = Lengths.fixed(osl_tokens)
    return Interval(30.0, requests, (), PROMPT, osl, answered=answered, ttft_ms=0.0, itl_ms=30.0)


def mean(weights: Weights) -> float:
    return sum(tokens * count for tokens, count in weights.items()) / sum(weights.values())


def test_answers_belong_to_the_interval_in_which_they_arrived() -> None:
    ended = [interval(100, 0, 1), interval(100, 0, 1), interval(100, 100, 2000), interval(100, 100, 1000)]
    (_, first), _, (_, third), _ = arrived_lengths(ended)
    assert mean(first) == pytest.approx(2000, rel=0.01)
    assert mean(third) == pytest.approx(1000, rel=0.01)


def test_without_censored_answers_the_estimator_is_the_distribution_of_what_ended() -> None:
    ended = [{10.0: 3.0, 20.0: 1.0}]
    assert product_limit([4.0], ended, [math.inf]) == [(10.0, 0.75), (20.0, 0.25)]


def test_the_estimator_of_kaplan_and_meier_counts_those_that_still_run_as_long_as_they_are_old() -> None:
    """By hand: 4 of 10 end at 10; 5 that came later are 15 old, of which 2 ended at 10; 6 are left at 20."""
    ended = [{10.0: 4.0, 20.0: 6.0}, {10.0: 2.0}]
    parts = product_limit([10.0, 5.0], ended, [math.inf, 15.0])
    assert parts == [(10.0, pytest.approx(6 / 15)), (20.0, pytest.approx(9 / 15))]


def test_answers_that_still_run_are_drawn_longer_than_they_are_old() -> None:
    """A turn of long answers has just begun: none of it has ended."""
    known = [interval(100, 50, 4000) for _ in range(10)]
    *_, (_, newest) = arrived_lengths([*known, interval(100, 0, 1)])
    assert mean(newest) == pytest.approx(4000, rel=0.01)


def test_requests_that_never_end_are_not_taken_for_long_answers() -> None:
    """A third is given up by clients; the rest ends at once."""
    found = arrived_lengths([interval(90, 60, 100) for _ in range(20)])
    assert mean(found[-1][1]) == pytest.approx(100, rel=0.01)


def test_an_interval_with_few_answers_has_the_lengths_of_the_window() -> None:
    *_, (prompts, answers) = arrived_lengths([*[interval(100, 100, 100)] * 9, interval(2, 1, 900)])
    assert mean(prompts) == pytest.approx(1000, rel=0.01)
    assert mean(answers) < 150
