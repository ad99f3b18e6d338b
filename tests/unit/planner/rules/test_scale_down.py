"""When workers that are not needed may go: the rules against wishes of a moment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.fleet.counts import Targets
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.model import Observation, PlannerState
from dynaplan.planner.rules.scale_down import late_roles
from dynaplan.planner.sizing.queueing.queueing_model import ServiceModel
from tests.unit.planner.rules.targets import SETTINGS, traffic
from tests.unit.planner.sizing.decisions import (
    INTERVALS,
    MANY,
    MODEL,
    ONE_EACH,
    decided,
    remembering,
    seen,
    why,
)


def test_a_fresh_state_removes_nobody() -> None:
    state, sizing = decided(seen(MANY, [2.0]), MANY)
    assert sizing.targets == MANY
    assert state.wanted == (ONE_EACH,)
    assert why(sizing, "steady") == (
        "3 prefill workers stay until 4 intervals have not needed them; "
        "2 decode workers stay until 4 intervals have not needed them"
    )


def test_a_fresh_state_adds_whoever_is_needed() -> None:
    assert decided(seen(ONE_EACH, [40.0]), ONE_EACH)[1].targets.prefill >= 3


@pytest.mark.parametrize(("startup_s", "intervals"), [(0.0, 1), (15.0, 2), (20.0, 2), (60.0, 4), (61.0, 5)])
def test_workers_leave_when_half_a_start_of_intervals_and_one_have_not_wanted_them(
    startup_s: float, intervals: int
) -> None:
    state, targets = PlannerState(), []
    for _ in range(intervals + 1):
        state, sizing = decided(seen(MANY, [2.0], startup_s), MANY, state)
        targets.append(sizing.targets)
    assert targets == [MANY] * (intervals - 1) + [ONE_EACH] * 2
    assert state.wanted == (ONE_EACH,) * intervals


def test_the_most_that_was_wanted_lately_stays_role_by_role() -> None:
    state = remembering(Targets(2, 1), Targets(1, 2), ONE_EACH)
    sizing = decided(seen(Targets(4, 4), [2.0]), Targets(4, 4), state)[1]
    assert sizing.targets == Targets(2, 2)
    assert why(sizing, "steady") == (
        "2 prefill workers were needed within the last 4 intervals; "
        "2 decode workers were needed within the last 4 intervals"
    )


def test_what_was_wanted_longer_ago_is_forgotten() -> None:
    state = remembering(Targets(3, 2), *[ONE_EACH] * (INTERVALS - 1))
    assert decided(seen(MANY, [2.0]), MANY, state)[1].targets == ONE_EACH


def test_what_was_wanted_once_asks_for_nobody_who_is_not_there() -> None:
    state = remembering(*[Targets(8, 8)] * INTERVALS)
    assert decided(seen(Targets(2, 1), [2.0]), Targets(2, 1), state)[1].targets == Targets(2, 1)


def test_while_load_is_foretold_to_go_on_falling_nothing_is_waited_for() -> None:
    state = remembering(*[MANY] * INTERVALS)
    falling, steady = seen(MANY, [5.0, 3.0, 1.0]), seen(MANY, [5.0, 5.0, 5.0])
    assert decided(falling, MANY, state)[1].targets == ONE_EACH
    assert decided(steady, MANY, state)[1].targets == MANY


@pytest.mark.parametrize(
    "rates",
    [[5.0], [5.0, 4.6], [5.0, 6.0, 3.0], [5.0, 1.0, 2.0]],
    ids=["one", "hardly", "first up", "then up"],
)
def test_what_is_foretold_falls_only_if_it_does_so_all_the_time_and_by_a_tenth(rates: list[float]) -> None:
    state = remembering(*[MANY] * INTERVALS)
    assert decided(seen(MANY, rates), MANY, state)[1].targets == MANY


def test_a_fresh_state_removes_nobody_while_load_falls_either() -> None:
    assert decided(seen(MANY, [5.0, 3.0, 1.0]), MANY)[1].targets == MANY


def test_while_load_falls_who_is_needed_on_the_way_stays() -> None:
    """Of what is foretold the most counts, and that is the soonest."""
    state = remembering(*[ONE_EACH] * INTERVALS)
    current = Targets(4, 2)
    assert decided(seen(current, [40.0, 20.0, 2.0]), current, state)[1].targets.prefill == 3


def test_where_gpus_lack_a_role_gives_up_a_worker_to_the_other_as_late() -> None:
    """It would be missing here at once, and serve there after a start only."""
    scarce = replace(SETTINGS, max_gpu_budget=5)
    current, state, targets = Targets(4, 1), PlannerState(), []
    for _ in range(INTERVALS):
        state, sizing = decided(seen(current, [50.0]), current, state, scarce)
        targets.append(sizing.targets)
    assert targets == [current] * (INTERVALS - 1) + [Targets(3, 2)]


def test_no_data_remembers_nothing_and_changes_nothing() -> None:
    silent = replace(seen(MANY, [2.0]), traffic=traffic(None), foresight=None)
    before = remembering(ONE_EACH)
    after, sizing = decided(silent, MANY, before)
    assert (after, sizing.targets) == (before, MANY)
    assert "no frontend answered" in why(sizing, "demand")


# -- what is late --------------------------------------------------------------------------------------------

PROMISE = SlaTargets(500.0, 20.0)
CALM = seen(MANY, [2.0])
BOTH = {Role.PREFILL, Role.DECODE}


def measured(ttft_ms: float | None, itl_ms: float | None, observation: Observation = CALM) -> Observation:
    assert observation.traffic
    return replace(observation, traffic=replace(observation.traffic, ttft_ms=ttft_ms, itl_ms=itl_ms))


def late(observation: Observation, service: ServiceModel = MODEL.service) -> set[Role]:
    return set(late_roles(service, observation, PROMISE))


@pytest.mark.parametrize(
    ("ttft_ms", "itl_ms", "roles"),
    [
        (100.0, 10.0, set()),
        (500.0, 20.0, set()),
        (501.0, 10.0, BOTH),
        (100.0, 21.0, {Role.DECODE}),
        (501.0, 21.0, BOTH),
        (None, None, set()),
        (None, 21.0, {Role.DECODE}),
    ],
)
def test_a_long_itl_comes_from_who_decodes_and_a_long_ttft_from_either(
    ttft_ms: float | None, itl_ms: float | None, roles: set[Role]
) -> None:
    assert late(measured(ttft_ms, itl_ms)) == roles


def test_nobody_of_a_role_that_is_late_may_go_until_it_is_not() -> None:
    state = remembering(*[ONE_EACH] * INTERVALS)
    slow_decode = decided(measured(100.0, 25.0), MANY, state)[1]
    assert slow_decode.targets == Targets(1, MANY.decode)
    assert why(slow_decode, "steady") == "2 decode workers stay: the mean ITL was 25 ms"
    backlog = decided(measured(900.0, 10.0), MANY, state)[1]
    assert backlog.targets == MANY
    assert "3 prefill workers stay: the mean TTFT was 900 ms" in why(backlog, "steady")
    assert decided(measured(100.0, 10.0), MANY, state)[1].targets == ONE_EACH


def test_who_is_late_keeps_workers_while_load_falls_too() -> None:
    falling = measured(900.0, 10.0, seen(MANY, [5.0, 3.0, 1.0]))
    assert decided(falling, MANY, remembering(*[ONE_EACH] * INTERVALS))[1].targets == MANY


def test_a_load_that_is_too_much_is_late() -> None:
    assert late(measured(900.0, 10.0, seen(ONE_EACH, [100.0]))) == BOTH


def test_a_mean_that_no_number_of_workers_would_bring_under_the_target_keeps_nobody() -> None:
    """Where the model says that it is over the target all the same, sizing has counted that already."""
    hopeless = SlaTargets(20.0, 2.0)
    assert not late_roles(MODEL.service, measured(100.0, 10.0), hopeless)


def test_of_an_aggregated_deployment_the_decode_workers_are_what_is_late() -> None:
    aggregated = replace(MODEL.service, prefill=None)
    observation = measured(900.0, 10.0, seen(Targets(0, 3), [2.0]))
    assert Role.DECODE in late(observation, aggregated)


@pytest.mark.parametrize("serving", [Targets(0, 2), Targets(2, 0)])
def test_nothing_is_known_to_be_late_where_a_role_had_no_workers(serving: Targets) -> None:
    load = replace(CALM.load, prefill_workers=serving.prefill, decode_workers=serving.decode)
    assert not late(replace(measured(900.0, 25.0), load=load))


def test_nothing_is_known_to_be_late_without_data() -> None:
    assert CALM.traffic
    for nothing in (
        None,
        traffic(None),
        replace(CALM.traffic, requests=0.0),
        replace(CALM.traffic, isl=None),
    ):
        assert not late(replace(CALM, traffic=nothing))
