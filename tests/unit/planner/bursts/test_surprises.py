"""How far a load has exceeded its forecasts."""

from __future__ import annotations

import pytest

from dynaplan.planner.bursts.surprises import surprise


@pytest.mark.parametrize(
    ("outcomes", "beyond"),
    [
        ([(0.0, 10.0)] * 30, 0.0),
        ([(4.0, 14.0), (-4.0, 10.0)] * 15, 4.0),
        ([(-4.0, 10.0)] * 30, 0.0),
        ([(0.0, 0.0)] * 30, 0.0),
        ([], 0.0),
        ([(10.0, 20.0), *[(0.0, 10.0)] * 100], 0.0),  # 2 % of the requests
        ([(40.0, 50.0), (30.0, 40.0), *[(0.0, 10.0)] * 100], 30.0),
    ],
)
def test_the_surprise_is_what_came_beyond_the_forecast_but_for_as_many_as_may_miss(
    outcomes: list[tuple[float, float]], beyond: float
) -> None:
    assert surprise(outcomes, 0.05) == beyond
