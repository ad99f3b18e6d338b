"""What chance makes of a number of requests."""

from __future__ import annotations

import pytest

from dynaplan.planner.forecasting.arrivals import exceeds_chance, is_within_chance


@pytest.mark.parametrize(("requests", "news"), [(0.0, False), (100.0, False), (140.0, False), (141.0, True)])
def test_news_is_what_exceeds_the_expected_number_by_four_of_its_square_roots(
    requests: float, news: bool
) -> None:
    assert exceeds_chance(requests, 100.0) is news


def test_any_request_is_news_where_none_was_expected() -> None:
    assert exceeds_chance(1.0, 0.0)
    assert not exceeds_chance(0.0, 0.0)


@pytest.mark.parametrize(
    ("requests", "near"), [(89.0, False), (90.0, True), (100.0, True), (110.0, True), (111.0, False)]
)
def test_a_number_is_near_its_mean_within_the_square_root_on_either_side(requests: float, near: bool) -> None:
    assert is_within_chance(requests, 100.0) is near
