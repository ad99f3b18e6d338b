"""What holds for every decision of the policies that plan for targets, whatever is seen."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from functools import cache

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import FleetCounts, PoolSizes, WorkerCounts
from dynaplan.contract.holds import Hold, RoleHolds
from dynaplan.contract.store_keys import SCALED_ROLES, DesiredCounts
from dynaplan.contract.traffic import Lengths, Traffic
from dynaplan.planner.model import (
    LOAD_ABOVE,
    LOAD_BELOW,
    LOAD_WITHIN,
    AverageLoad,
    BacktestResult,
    Corrections,
    Decision,
    ErrorBudget,
    Expected,
    Observation,
    PlannerState,
    TrafficForecast,
)
from dynaplan.planner.rules import guards
from dynaplan.planner.rules.decision import decide
from dynaplan.planner.rules.sla_policy import PerformanceModel
from tests.unit.planner.rules import targets


def amounts(most: float) -> st.SearchStrategy[float | None]:
    """No data, nothing, what is usual, or anything up to far too much."""
    return st.one_of(st.none(), st.just(0.0), st.floats(0, most / 1000), st.floats(0, most))


counts = st.integers(0, 6)
pools = st.builds(
    WorkerCounts, counts, counts, counts, counts, counts, gpus=st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0])
)
ids = st.integers(-1, 3)
bounds = st.one_of(
    st.none(),
    st.builds(
        lambda least, more: Hold(least, None if more is None else least + more), counts, st.none() | counts
    ),
)
loads = st.builds(
    AverageLoad,
    pulls=counts,
    kv_usage=amounts(2),
    prefill_queue=amounts(100),
    prefill_queue_first=amounts(100),
    prefill_queue_last=amounts(1e6),
    prefill_workers=counts,
    decode_workers=counts,
    changed=st.sampled_from(["", "", "", "prefill 1, decode 1 -> prefill 1, decode 2"]),
)
histograms = st.one_of(
    st.none(), st.just(Lengths((), ())), st.lists(st.integers(1, 100_000), max_size=4).map(Lengths.of)
)
traffics = st.one_of(
    st.none(),
    st.just(Traffic(10.0, missing="no frontend answered")),
    st.builds(
        Traffic,
        st.floats(1, 60),
        amounts(1e6),
        amounts(1e5),
        amounts(1e4),
        amounts(1e6),
        amounts(1e3),
        amounts(1e6),
        histograms,
        histograms,
        amounts(100),
    ),
)
expectations = st.builds(
    Expected,
    st.one_of(st.floats(10, 1000), amounts(1e9)),
    amounts(1e6),
    amounts(1e6),
    st.integers(1, 50),
    st.floats(0, 1e9),
)
foresights = st.one_of(
    st.none(),
    st.builds(
        TrafficForecast,
        st.floats(1, 60),
        st.lists(expectations, max_size=2).map(tuple),
        histograms,
        histograms,
        amounts(100),
    ),
)
backtests = st.one_of(
    st.none(),
    st.just(BacktestResult(missing="first start")),
    st.builds(
        BacktestResult,
        st.builds(PoolSizes, counts, counts),
        st.sampled_from(["", "", "it was killed"]),
        is_new=st.booleans(),
        change=st.sampled_from([LOAD_ABOVE, LOAD_BELOW, LOAD_WITHIN]),
    ),
)
observations = st.builds(
    Observation,
    at_s=st.floats(0, 1e6),
    fleet=st.builds(FleetCounts, pools, pools, st.sampled_from([0, 1, 4, 8, 16])),
    desired=st.builds(DesiredCounts, st.integers(-1, 6), st.integers(-1, 6), ids, ids),
    load=loads,
    unknown=st.sampled_from(["", "", "", "the store is away"]),
    traffic=traffics,
    foresight=foresights,
    startup_s=st.floats(0, 600),
    backtest=backtests,
)
held = st.builds(RoleHolds, bounds, bounds)
remaining = st.one_of(st.just(0.0), st.floats(-100, 100), st.floats(-1e9, 1e9))
states = st.builds(
    PlannerState,
    decode_grace_left=st.integers(0, 3),
    pending_id=ids,
    pending_since_s=st.floats(0, 1e6),
    corrections=st.builds(Corrections, st.floats(0.5, 3), st.floats(0.5, 3)),
    error_budget=st.builds(ErrorBudget, remaining, remaining),
)
policies = st.builds(
    replace,
    st.just(targets.SETTINGS),
    policy=st.sampled_from(["sla", "both"]),
    max_gpu_budget=st.integers(1, 16),
    min_gpu_budget=st.integers(1, 4),
    decode_engine_num_gpu=st.sampled_from([1, 2, 4]),
    prefill_engine_num_gpu=st.sampled_from([1, 2, 4]),
    no_correction=st.booleans(),
    slo_window_s=st.sampled_from([0.0, 60.0, 3600.0]),
)


@st.composite
def settled(draw: st.DrawFn) -> tuple[PlannerSettings, PlannerState, Observation]:
    """Every worker there, GPUs left or not, and a load that is not far from what they can bear."""
    prefill, decode = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    rates = draw(st.lists(st.floats(0, 100), min_size=1, max_size=2))
    kv, queue = draw(st.floats(0, 1)), draw(st.floats(0, 10))
    planner = replace(
        targets.SETTINGS,
        policy=draw(st.sampled_from(["sla", "both"])),
        max_gpu_budget=prefill + decode + draw(st.integers(0, 3)),
    )
    seen = targets.planned_interval(prefill, decode, rates, kv=kv, queue=(queue,))
    return planner, PlannerState(), seen


seen_anywhere = st.one_of(st.tuples(policies, states, observations), settled())


@cache
def model() -> PerformanceModel:
    return targets.model()


def decided(
    planner: PlannerSettings, state: PlannerState, observation: Observation
) -> tuple[PlannerState, Decision]:
    return decide(planner, state, observation, model())


@settings(max_examples=60, deadline=None)
@given(seen_anywhere)
@example(
    (
        replace(targets.SETTINGS, no_correction=False),
        PlannerState(),
        replace(
            targets.planned_interval(1, 1, [10.0]),
            traffic=replace(targets.traffic(10.0), osl_tokens=0.0),
        ),
    )
)
def test_anything_seen_has_a_decision_that_depends_on_nothing_else(
    case: tuple[PlannerSettings, PlannerState, Observation],
) -> None:
    planner, state, observation = case
    after, decision = decided(planner, state, observation)
    assert (after, decision) == decided(planner, state, observation)
    assert decision.desired == decision.steps[-1].after
    assert min(decision.desired.prefill, decision.desired.decode) >= 0
    assert all(step.why and "nan" not in step.why for step in decision.steps)


@settings(max_examples=60, deadline=None)
@given(seen_anywhere)
@example(
    (
        replace(targets.SETTINGS, policy="both", max_gpu_budget=5),
        PlannerState(),
        targets.planned_interval(1, 4, [40.0]),
    )
)
@example(
    (
        replace(targets.SETTINGS, max_gpu_budget=2, min_gpu_budget=2),
        PlannerState(),
        replace(targets.planned_interval(2, 0, [0.0]), foresight=None),
    )
)
def test_the_budget_holds_beyond_what_is_held_already_and_the_minimums_hold(
    case: tuple[PlannerSettings, PlannerState, Observation],
) -> None:
    planner, state, observation = case
    _, decision = decided(planner, state, observation)
    fleet, current, desired = observation.fleet, decision.current, decision.desired
    held = guards.gpus_in_use(planner, fleet, current, current)
    will_hold = guards.gpus_in_use(planner, fleet, current, desired)
    assert will_hold <= max(planner.max_gpu_budget, held)
    for role in SCALED_ROLES:
        if desired.of(role) < current.of(role):
            assert desired.of(role) >= guards.min_workers(planner, guards.gpus_of(planner, fleet, role))


@settings(max_examples=60, deadline=None)
@given(seen_anywhere, held, st.sampled_from(["load", "sla", "both"]))
@example(
    (
        replace(targets.SETTINGS, max_gpu_budget=2),
        PlannerState(),
        targets.planned_interval(1, 1, [160.0]),
    ),
    RoleHolds(decode=Hold(at_most=0)),
    "sla",
)
def test_no_decision_leaves_the_bounds_of_a_hold_and_the_other_role_gains_only_what_it_leaves(
    case: tuple[PlannerSettings, PlannerState, Observation], holds: RoleHolds, policy: str
) -> None:
    planner, state, observation = case
    planner, observation = replace(planner, policy=policy), replace(observation, holds=holds)
    _, decision = decided(planner, state, observation)
    current, desired = decision.current, decision.desired
    if observation.unknown:
        assert desired == current
        return
    assert holds.beside(current).bounded(desired) == desired
    _, free = decided(planner, state, replace(observation, holds=RoleHolds()))
    for role in SCALED_ROLES:
        if holds.of(role) is None and desired.of(role) > free.desired.of(role):
            [other] = set(SCALED_ROLES) - {role}
            assert desired.of(other) <= free.desired.of(other)


@settings(max_examples=60, deadline=None)
@given(seen_anywhere)
def test_both_never_goes_below_what_the_targets_need(
    case: tuple[PlannerSettings, PlannerState, Observation],
) -> None:
    planner, state, observation = case
    _, floor = decided(replace(planner, policy="sla"), state, observation)
    _, both = decided(replace(planner, policy="both"), state, observation)
    for role in SCALED_ROLES:
        assert both.desired.of(role) >= floor.desired.of(role)


@settings(max_examples=60, deadline=None)
@given(policies, states, observations)
def test_the_error_budget_stays_finite_whatever_was_missed(
    planner: PlannerSettings, state: PlannerState, observation: Observation
) -> None:
    after, _ = decided(planner, state, observation)
    left = after.error_budget
    assert math.isfinite(left.ttft_requests)
    assert math.isfinite(left.itl_requests)
    came = (observation.traffic.requests if observation.traffic else 0.0) or 0.0
    for now, before in (
        (left.ttft_requests, state.error_budget.ttft_requests),
        (left.itl_requests, state.error_budget.itl_requests),
    ):
        assert min(before, 0.0) - came <= now <= max(before, 0.0) + came


PLENTY = replace(targets.SETTINGS, max_gpu_budget=1000)
"""Where GPUs lack, a role that may miss less gets workers that the other one loses."""


@settings(max_examples=40, deadline=None)
@given(settled(), st.floats(1, 2000), st.floats(1, 50), st.floats(1, 5), st.floats(1, 5))
def test_the_later_the_same_load_was_the_more_workers_or_as_many(
    case: tuple[PlannerSettings, PlannerState, Observation],
    ttft_ms: float,
    itl_ms: float,
    ttft_factor: float,
    itl_factor: float,
) -> None:
    _, state, observation = case
    assert observation.traffic
    early, late = (
        replace(observation, traffic=replace(observation.traffic, ttft_ms=ttft, itl_ms=itl))
        for ttft, itl in ((ttft_ms, itl_ms), (ttft_factor * ttft_ms, itl_factor * itl_ms))
    )
    few, many = decided(PLENTY, state, early)[1].desired, decided(PLENTY, state, late)[1].desired
    assert many.decode >= few.decode
    assert many.prefill + many.decode >= few.prefill + few.decode


@settings(max_examples=30, deadline=None)
@given(policies, states, observations)
def test_an_unknown_fleet_changes_nothing_whatever_else_is_observed(
    planner: PlannerSettings, state: PlannerState, observation: Observation
) -> None:
    _, decision = decided(planner, state, replace(observation, unknown="the store is away"))
    assert decision.desired == decision.current


@settings(max_examples=30, deadline=None)
@given(policies, states, observations)
def test_unknown_traffic_changes_nothing_for_the_targets(
    planner: PlannerSettings, state: PlannerState, observation: Observation
) -> None:
    planner = replace(planner, policy="sla")
    foresight = observation.foresight
    assume(foresight is None or all(each.requests is None for each in foresight.expected))
    _, decision = decided(planner, state, observation)
    assert decision.desired.prefill == decision.current.prefill
    assert decision.desired.decode == decision.current.decode or not decision.current.decode
    assert any("no data" in step.why for step in decision.steps)


@settings(max_examples=60, deadline=None)
@given(states, observations)
def test_what_was_seen_and_remembered_reads_back_from_json(
    state: PlannerState, observation: Observation
) -> None:
    read = json.loads(json.dumps({"seen": observation.to_json(), "state": asdict(state)}))
    assert Observation.from_json(read["seen"]) == observation
    assert PlannerState.from_json(read["state"]) == state
