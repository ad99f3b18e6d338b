"""Draws have the means and the tails that they say."""

from __future__ import annotations

from itertools import islice
from statistics import mean, stdev

import pytest

from dynaplan.simulation.traces.distributions import exponential, lengths, normal, pareto
from dynaplan.util.splitmix import uniform_draws


def test_means_and_spreads_are_those_asked_for() -> None:
    draws = uniform_draws(1)
    exponentials = [exponential(draws, 5.0) for _ in range(20_000)]
    normals = [normal(draws) for _ in range(20_000)]

    assert mean(exponentials) == pytest.approx(5, rel=0.03) == pytest.approx(stdev(exponentials), rel=0.05)
    assert mean(normals) == pytest.approx(0, abs=0.03)
    assert stdev(normals) == pytest.approx(1, rel=0.03)
    assert set(islice(lengths(30, 0, draws), 5)) == {30}
    assert mean(islice(lengths(300, 0.5, draws), 20_000)) == pytest.approx(300, rel=0.03)


def test_a_heavy_tail_falls_as_a_power_and_has_its_mean() -> None:
    draws = uniform_draws(2)
    seen = [pareto(draws, 10.0, 3.0) for _ in range(100_000)]

    assert mean(seen) == pytest.approx(10, rel=0.03)
    least = 10 * 2 / 3
    assert min(seen) == pytest.approx(least, rel=1e-3)
    assert sum(each > 10 * least for each in seen) == pytest.approx(100, rel=0.4)
