"""A histogram's points stand for it: mean, spread and bounds."""

from __future__ import annotations

import pytest

from dynaplan.contract.traffic import Lengths
from dynaplan.planner.sizing.queueing.workload import MAX_POINTS, points_of
from tests.unit.planner.sizing.engine_pools import Shape, arrivals

FRONTEND_BOUNDS = (0, 100, 210, 430, 870, 1800, 3600, 7400, 15000, 31000, 63000, 130000)


def coarse(tokens: list[int]) -> Lengths:
    """As the frontend's histogram tells them: few buckets, and the exact mean."""
    counts = [0.0] * (len(FRONTEND_BOUNDS) + 1)
    for each in tokens:
        counts[sum(each > bound for bound in FRONTEND_BOUNDS)] += 1
    return Lengths(FRONTEND_BOUNDS, tuple(counts), sum(tokens) / len(tokens))


def test_the_mean_of_a_coarse_histogram_is_the_exact_one() -> None:
    tokens = [each.isl for each in arrivals(Shape(), 1.0, 3000)]
    points = points_of(coarse(tokens), 20_000)
    assert points.moment(1) == pytest.approx(sum(tokens) / len(tokens))
    square = sum(each**2 for each in tokens) / len(tokens)
    assert points.moment(2) == pytest.approx(square, rel=0.1)


def test_a_fixed_length_is_one() -> None:
    points = points_of(Lengths.fixed(3000), 20_000)
    assert points.moment(1) == pytest.approx(3000, abs=1)
    assert max(points.tokens) <= 3000


def test_the_shares_sum_to_one_and_there_are_not_too_many() -> None:
    points = points_of(Lengths.of(range(1, 20_000), buckets_per_doubling=10), 20_000)
    assert sum(points.shares) == pytest.approx(1)
    assert len(points.tokens) <= MAX_POINTS
    assert points.moment(1) == pytest.approx(10_000, rel=0.01)


def test_what_is_longer_than_the_last_bound_is_no_longer_than_anything_can_be() -> None:
    points = points_of(Lengths((100.0,), (1.0, 1.0)), 150)
    assert max(points.tokens) <= 150
    assert points.moment(1) > 75


def test_a_length_beyond_the_context_counts_as_the_context() -> None:
    assert max(points_of(Lengths.fixed(50_000), 16_384).tokens) == 16_384


def test_an_empty_histogram_has_no_points() -> None:
    assert points_of(Lengths((), ()), 100).tokens == ()
    assert points_of(Lengths((10.0,), (0.0,)), 100).tokens == ()
    assert points_of(Lengths.of([]), 100).tokens == ()


def test_histograms_add_up() -> None:
    both = Lengths((10.0, 20.0), (1.0, 0.0), 5.0) + Lengths((10.0, 20.0), (0.0, 3.0), 15.0)
    assert both == Lengths((10.0, 20.0), (1.0, 3.0), 12.5)
