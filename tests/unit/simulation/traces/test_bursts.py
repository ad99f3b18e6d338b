"""Families of bursts have the rates, the silences and the tails that they say.

Draws have the means and the tails that they say.
"""

from __future__ import annotations

from itertools import islice, pairwise
from statistics import mean, pvariance, stdev

import pytest

from dynaplan.simulation.traces.bursts import BURSTS, exponential, lengths, normal, pareto
from dynaplan.simulation.traces.synthetic import synthetic
from dynaplan.util.splitmix import UniformDraws

HOUR = "duration=3600"


def arrivals(text: str, seed: int = 1) -> list[float]:
    return [each.arrival_s for each in synthetic(text, seed)]


def counts(arrivals_s: list[float], bin_s: float, duration_s: float) -> list[int]:
    found = [0] * int(duration_s / bin_s)
    for at_s in arrivals_s:
        found[int(at_s / bin_s)] += 1
    return found


@pytest.mark.parametrize("kind", BURSTS)
def test_arrivals_ascend_and_are_far_from_poisson(kind: str) -> None:
    seen = arrivals(f"{kind}:{HOUR}")

    assert all(one <= other for one, other in pairwise(seen))
    assert seen[0] >= 0 and seen[-1] < 3600
    per_interval = counts(seen, 30, 3600)
    assert pvariance(per_interval) > 10 * mean(per_interval)


@pytest.mark.parametrize("kind", BURSTS)
def test_a_seed_beside_the_text_counts_unless_the_text_has_one(kind: str) -> None:
    assert arrivals(kind, seed=5) == arrivals(f"{kind}:seed=5") != arrivals(kind)
    assert arrivals(f"{kind}:seed=5", seed=7) == arrivals(f"{kind}:seed=5")


def test_bursts_and_silences_last_as_long_as_they_say_on_average() -> None:
    seen = arrivals("bursts:low=0,high=4,on=60,off=120,tail=3,duration=50000")

    pauses = [after - before for before, after in pairwise(seen) if after - before > 5]
    busy_s = 50_000 - sum(pauses)
    assert mean(pauses) == pytest.approx(120, rel=0.15)
    assert len(seen) / busy_s == pytest.approx(4, rel=0.05)


def test_the_tail_of_silences_is_heavy() -> None:
    seen = arrivals("bursts:low=0,high=3,on=20,off=60,tail=1.2,duration=100000")

    pauses = sorted(after - before for before, after in pairwise(seen) if after - before > 5)
    assert pauses[-1] > 20 * pauses[len(pauses) // 2]


def test_levels_are_factors_apart_and_all_of_them_are_seen() -> None:
    seen = counts(arrivals("levels:low=1,high=27,levels=4,stay=50,tail=3,duration=4000"), 10, 4000)

    for rate in (1, 3, 9, 27):
        assert sum(abs(each - 10 * rate) < 3 * (10 * rate) ** 0.5 for each in seen) > 40


def test_a_batch_is_over_within_its_seconds() -> None:
    seen = arrivals("batches:every=100,size=50,within=3,tail=3,duration=100000")

    starts = [after for before, after in pairwise([-100.0, *seen]) if after - before > 3]
    assert len(seen) / len(starts) == pytest.approx(50, rel=0.2)


def test_a_crowd_comes_at_once_and_fades_to_the_steady_rate() -> None:
    seen = arrivals("crowds:low=2,high=30,every=1000,fade=20,tail=3,duration=30000")
    per_second = counts(seen, 1, 30_000)

    assert sorted(per_second)[len(per_second) // 2] == pytest.approx(2, abs=1)
    assert len(seen) / 30_000 == pytest.approx(2 + 30 * 20 / 1000, rel=0.15)


def test_sessions_are_as_many_people_as_they_say() -> None:
    seen = arrivals("sessions:people=20,think=4,on=100,off=300,tail=3,duration=20000")

    assert len(seen) / 20_000 == pytest.approx(20 * 0.25 / 4, rel=0.15)


def test_means_and_spreads_are_those_asked_for() -> None:
    draws = UniformDraws(1)
    exponentials = [exponential(draws, 5.0) for _ in range(20_000)]
    normals = [normal(draws) for _ in range(20_000)]

    assert mean(exponentials) == pytest.approx(5, rel=0.03) == pytest.approx(stdev(exponentials), rel=0.05)
    assert mean(normals) == pytest.approx(0, abs=0.03)
    assert stdev(normals) == pytest.approx(1, rel=0.03)
    assert set(islice(lengths(30, 0, draws), 5)) == {30}
    assert mean(islice(lengths(300, 0.5, draws), 20_000)) == pytest.approx(300, rel=0.03)


def test_a_heavy_tail_falls_as_a_power_and_has_its_mean() -> None:
    draws = UniformDraws(2)
    seen = [pareto(draws, 10.0, 3.0) for _ in range(100_000)]

    assert mean(seen) == pytest.approx(10, rel=0.03)
    least = 10 * 2 / 3
    assert min(seen) == pytest.approx(least, rel=1e-3)
    assert sum(each > 10 * least for each in seen) == pytest.approx(100, rel=0.4)
