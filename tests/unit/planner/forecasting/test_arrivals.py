"""Dispersion of arrivals at several time scales."""

from __future__ import annotations

import pytest

from dynaplan.planner.forecasting.arrivals import average_dispersions, dispersions_of


def test_batches_of_a_clock_have_less_dispersion_the_longer_the_windows():
    clock = (9.0, 0.0, 0.0) * 10
    scales, indices = zip(*dispersions_of(clock, 30.0), strict=True)
    assert scales == (1, 2, 4, 8)
    assert indices[0] == pytest.approx(6.2, abs=0.1)
    assert indices[0] > 1.5 * indices[1] > 2 * indices[2] > 2 * indices[3]


def test_batches_at_any_time_keep_it():
    places = {1, 2, 9, 11, 20, 21, 22, 27}
    indices = [index for _, index in dispersions_of([9.0 * (at in places) for at in range(30)], 30.0)]
    assert indices[2] > 0.8 * indices[0]


@pytest.mark.parametrize("arrivals", [(), (1.0,) * 4, (0.0,) * 30])
def test_too_few_pulls_or_no_arrival_say_nothing(arrivals):
    assert dispersions_of(arrivals, 30.0) == ()


def test_arrivals_that_fit_no_whole_window_leave_that_scale_out():
    assert [scale for scale, _ in dispersions_of((0.0,) * 4 + (5.0,), 5.0)] == [1.0]


def test_intervals_are_averaged_and_other_scales_begin_anew():
    before, newest = ((1.0, 2.0), (2.0, 4.0)), ((1.0, 4.0), (2.0, 8.0))
    assert average_dispersions(before, newest, 0.5) == ((1.0, 3.0), (2.0, 6.0))
    assert average_dispersions(before, (), 0.5) == before
    assert average_dispersions(before, ((1.0, 9.0),), 0.5) == ((1.0, 9.0),)
    assert average_dispersions((), newest, 0.5) == newest
