"""Workers that nobody manages take their part: a planner for targets asks for so many fewer of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.fleet.counts import FleetCounts, Targets, WorkerCounts
from dynaplan.planner.model import Observation, Sizing, WorkerLimits
from dynaplan.planner.rules.sla_policy import raise_limits, subtract_unmanaged, unmanaged_workers
from tests.unit.planner.sizing.decisions import MANY, ONE_EACH, decided, seen, why


def beside(observation: Observation, prefill: int = 0, decode: int = 0) -> Observation:
    fleet = observation.fleet
    return replace(
        observation,
        fleet=replace(
            fleet,
            prefill=replace(fleet.prefill, unmanaged=prefill),
            decode=replace(fleet.decode, unmanaged=decode),
        ),
    )


@pytest.mark.parametrize("requests_per_s", [20.0, 60.0])
def test_what_unmanaged_workers_do_nobody_else_is_asked_for(requests_per_s: float) -> None:
    """The same workers in all, whether one of each is managed or not."""
    alone = decided(seen(Targets(3, 3), [requests_per_s]), Targets(3, 3))[1]
    shared = decided(beside(seen(Targets(2, 2), [requests_per_s]), 1, 1), Targets(2, 2))[1]
    assert shared.targets == Targets(max(1, alone.targets.prefill - 1), max(1, alone.targets.decode - 1))
    assert shared.steps[-1].stage == "unmanaged"
    assert why(shared, "unmanaged").startswith("unmanaged workers serve too (prefill 1, decode 1): ")
    assert shared.steps[-1].after == shared.targets


def test_one_of_ones_own_stays_whatever_others_do() -> None:
    assert decided(beside(seen(ONE_EACH, [0.1]), 9, 9), ONE_EACH)[1].targets == ONE_EACH


def test_without_data_the_counts_stay_those_of_the_managed_ones() -> None:
    unknown = replace(beside(seen(MANY, [2.0]), 1, 1), foresight=None)
    assert decided(unknown, MANY)[1].targets == MANY


def test_an_unmanaged_prefill_worker_makes_no_pool() -> None:
    fleet = FleetCounts(WorkerCounts(unmanaged=2), WorkerCounts(unmanaged=1))
    assert unmanaged_workers(fleet, Targets(0, 3)) == Targets(0, 1)
    assert unmanaged_workers(fleet, Targets(1, 3)) == Targets(2, 1)


def test_limits_are_of_the_managed_ones_alone() -> None:
    limits = WorkerLimits(8, 1, 2, Targets(1, 1), Targets(4, 4))
    assert raise_limits(limits, Targets()) is limits
    expected = WorkerLimits(13, 1, 2, Targets(2, 3), Targets(5, 6))
    assert raise_limits(limits, Targets(1, 2)) == expected
    sizing = Sizing(Targets(1, 1))
    assert subtract_unmanaged(sizing, Targets()) is sizing
    assert subtract_unmanaged(sizing, Targets(3, 0)).targets == Targets(0, 1)
