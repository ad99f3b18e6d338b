"""How far misses may be off by chance: single ones, and those that come together."""

from __future__ import annotations

import pytest

from dynaplan.planner.backtesting.chance import allowed_misses, design_effect, min_requests, variance_of_sum

HUNDRED_EACH = [100.0] * 24


def test_allowed_misses_are_the_promised_part_and_chance() -> None:
    assert allowed_misses(10_000, 0.05, 0.0) == 500
    assert allowed_misses(10_000, 0.05, -2.0) == pytest.approx(500 - 2 * 21.79, abs=0.01)
    assert allowed_misses(10_000, 0.05, -2.0, effect=4.0) == pytest.approx(500 - 4 * 21.79, abs=0.02)


def test_so_many_requests_are_needed_to_say_that_so_few_miss() -> None:
    assert min_requests(0.05) == 52
    assert min_requests(0.01) == 269


def test_misses_that_are_as_many_everywhere_have_no_effect() -> None:
    assert design_effect(HUNDRED_EACH, [5.0] * 24) == 1.0
    assert design_effect([10.0, 1000.0] * 12, [1.0, 100.0] * 12) == 1.0


def test_misses_of_one_burst_count_as_about_one() -> None:
    once = [0.0] * 10 + [60.0] + [0.0] * 13
    assert design_effect(HUNDRED_EACH, once) == pytest.approx(60, rel=0.1)
    assert design_effect(HUNDRED_EACH, [15.0 if number % 6 == 0 else 0.0 for number in range(24)]) < 15


def test_a_burst_that_crosses_intervals_is_one() -> None:
    apart, together = [30.0, *[0.0] * 22, 30.0], [30.0, 30.0, *[0.0] * 22]
    assert variance_of_sum(HUNDRED_EACH, together) > 1.9 * variance_of_sum(HUNDRED_EACH, apart)


@pytest.mark.parametrize(
    ("came", "missed"),
    [([], []), ([0.0], [0.0]), ([5.0], [5.0]), ([5.0, 5.0], [0.0, 0.0]), ([0.0, 0.0], [0.0, 3.0])],
)
def test_where_nothing_came_or_nobody_or_everybody_missed_there_is_no_effect(
    came: list[float], missed: list[float]
) -> None:
    assert design_effect(came, missed) == 1.0
