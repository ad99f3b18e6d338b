from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from dynaplan.gateway.traffic import Lengths, Traffic
from dynaplan.planner.model import Demand

BOUNDS = (10.0, 100.0)


def test_the_greatest_mean_takes_each_length_at_the_bound_of_its_bucket() -> None:
    assert Lengths(BOUNDS, (1.0, 1.0, 2.0)).greatest_mean_tokens == pytest.approx((10 + 100 + 2 * 200) / 4)


@pytest.mark.parametrize("lengths", [Lengths((), ()), Lengths(BOUNDS, (0.0, 0.0, 0.0))])
def test_no_lengths_have_a_greatest_mean_of_0(lengths: Lengths) -> None:
    assert lengths.greatest_mean_tokens == 0.0


def test_the_mean_of_a_sum_is_exact_only_if_both_are() -> None:
    exact, unknown = Lengths(BOUNDS, (1.0, 0.0, 0.0), 4.0), Lengths(BOUNDS, (0.0, 3.0, 0.0), 40.0)
    assert (exact + unknown).mean_tokens == pytest.approx((4 + 3 * 40) / 4)
    assert (exact + Lengths(BOUNDS, (0.0, 3.0, 0.0))).mean_tokens is None


def test_of_a_part_of_the_requests_fewer_come_together() -> None:
    none = Lengths((), ())
    demand = Demand(8.0, none, none, dispersions=((1.0, 5.0), (2.0, 0.0)))
    assert demand.scaled(0.5) == Demand(4.0, none, none, dispersions=((1.0, 3.0), (2.0, 0.5)))
    assert demand.scaled(0.0).dispersions == ((1.0, 1.0), (2.0, 1.0))
    assert demand.scaled(2.0).dispersions == ((1.0, 9.0), (2.0, 0.0))


def test_counted_misses_are_read_back_and_are_not_known_of_older_records() -> None:
    traffic = Traffic(30.0, 9.0, over_ttft=((500.0, 3.0), (900.0, 1.0)), over_itl=((20.0, 0.0),))
    document = json.loads(json.dumps(asdict(traffic)))
    assert Traffic.from_json(document) == traffic
    del document["over_ttft"]
    assert Traffic.from_json(document).over_ttft == ()
