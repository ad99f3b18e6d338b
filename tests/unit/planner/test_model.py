from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from dynaplan.contract.counts import FleetCounts, PoolSizes, WorkerCounts
from dynaplan.contract.traffic import Lengths, Traffic
from dynaplan.planner.model import (
    BacktestResult,
    Corrections,
    Decision,
    DecisionStep,
    Demand,
    ErrorBudget,
    Expected,
    Observation,
    PlannerState,
    SplitTrial,
    TrafficForecast,
)

STATE = PlannerState(2, 3, 4.0, Corrections(1.2, 0.9), ErrorBudget(5.0, -6.0))


def test_a_state_is_read_as_it_was_written() -> None:
    assert PlannerState.from_json(json.loads(json.dumps(asdict(STATE)))) == STATE


def test_a_state_of_a_version_that_remembered_bursts_is_read_without_them() -> None:
    document = json.loads(json.dumps(asdict(STATE)))
    document |= {"wanted": [{"prefill": 1, "decode": 1}], "standing": {}, "hedge": {"trials": []}}
    document["error_budget"]["kept_s"] = 30.0
    assert PlannerState.from_json(document) == STATE


def test_a_forecast_of_a_version_that_knew_surprises_is_read() -> None:
    document = json.loads(json.dumps(asdict(TrafficForecast(30.0, (Expected(5.0, why="constant"),)))))
    document["expected"][0]["surprise"] = 3.0
    assert TrafficForecast.from_json(document) == TrafficForecast(30.0, (Expected(5.0, why="constant"),))


def test_a_backtest_is_read_as_it_was_written() -> None:
    tried = (SplitTrial(PoolSizes(3, 1), 4, 0.97), SplitTrial(PoolSizes(2, 1), 3, 0.91, is_at_most=True))
    backtest = BacktestResult(PoolSizes(3, 1), "late", 500, 3600.0, tried, is_new=True, change="above")
    for each in (None, BacktestResult(missing="first start"), backtest):
        seen = Observation(0.0, backtest=each)
        assert Observation.from_json(json.loads(json.dumps(seen.to_json()))) == seen


def test_a_published_fleet_is_read() -> None:
    document = {
        "roles": {
            "prefill": {"ready": 2, "draining": 1},
            "decode": {"starting": 1, "failed": 3, "asleep": 2, "else": 9},
        },
        "gpus_per_worker": {"prefill": 0.5, "decode": 2},
        "startup_s": {"decode": 40.5},
        "gpus_total": 8,
    }
    assert FleetCounts.from_json(document) == FleetCounts(
        prefill=WorkerCounts(ready=2, draining=1, gpus=0.5),
        decode=WorkerCounts(starting=1, failed=3, asleep=2, gpus=2.0, startup_s=40.5),
        gpus_total=8,
    )


def test_sleeping_workers_are_there_and_hold_their_gpus() -> None:
    counts = WorkerCounts(ready=1, asleep=2, failed=1, draining=1)
    assert (counts.holding, counts.present) == (3, 4)


def test_sleeping_workers_are_in_a_record_only_where_there_are_any() -> None:
    fleet = FleetCounts(decode=WorkerCounts(asleep=2))
    document = Observation(0.0, fleet).to_json()
    assert document["fleet"]["decode"]["asleep"] == 2
    assert "prefill" not in document["fleet"]
    assert Observation.from_json(document).fleet == fleet


def test_numbers_below_0_are_0() -> None:
    document = {"roles": {"decode": {"ready": -1}}, "gpus_total": -8, "gpus_per_worker": {"decode": -1}}
    assert FleetCounts.from_json(document) == FleetCounts()


@pytest.mark.parametrize(
    "document", [{"roles": []}, {"roles": {"decode": {"ready": "two"}}}, {"gpus_total": None}]
)
def test_anything_but_a_fleet_is_a_value_error(document: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        FleetCounts.from_json(document)


def test_a_published_fleet_is_read_back_as_it_was() -> None:
    prefill = WorkerCounts(ready=1, asleep=1, gpus=2.0, startup_s=40.0, unmanaged=1)
    fleet = FleetCounts(prefill, WorkerCounts(starting=1, draining=2, backoff=1, failed=1), 8)
    assert FleetCounts.from_json(fleet.to_json()) == fleet


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


ONE_EACH, MORE = PoolSizes(1, 1), PoolSizes(2, 1)


@pytest.mark.parametrize(
    ("steps", "is_withheld"),
    [
        (
            (
                DecisionStep("demand", ONE_EACH, MORE, "a load"),
                DecisionStep("budget", MORE, ONE_EACH, "too few GPUs"),
            ),
            True,
        ),
        (
            (
                DecisionStep("known", ONE_EACH, ONE_EACH, "all is"),
                DecisionStep("pending", ONE_EACH, ONE_EACH, "waits"),
            ),
            True,
        ),
        (
            (
                DecisionStep("pending", ONE_EACH, ONE_EACH, "none"),
                DecisionStep("demand", ONE_EACH, ONE_EACH, "a load"),
            ),
            False,
        ),
    ],
    ids=["budget", "pending", "nothing is needed"],
)
def test_scaling_is_withheld_where_more_is_needed_or_a_decision_is_waited_for(
    steps: tuple[DecisionStep, ...], is_withheld: bool
) -> None:
    assert Decision(ONE_EACH, ONE_EACH, steps).is_withheld is is_withheld
    assert not Decision(ONE_EACH, MORE, steps).is_withheld
