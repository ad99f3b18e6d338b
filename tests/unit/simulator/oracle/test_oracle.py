from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.domain.lifecycle import Role
from dynaplan.domain.planning.targets import Targets
from dynaplan.domain.trace import TracedRequest
from dynaplan.simulator.oracle.dynamic_programme import Prices, cheapest_levels
from dynaplan.simulator.oracle.oracle import Oracle, OracleOptions, find_oracle
from dynaplan.simulator.oracle.schedule import SchedulePolicy, WindowTiming, filled, gpu_seconds, schedule
from dynaplan.simulator.run import StaticPolicy, simulate
from dynaplan.simulator.service import ServiceSettings
from tests.unit.simulator.services import at_once, every, service, workers

STARTUP_S = 10.0
QUICK = OracleOptions(effort=2)


def step() -> list[TracedRequest]:
    """A request a second for 40 s, then eight a second: of 200 ms prefill each, hardly any decoding."""
    quiet = [TracedRequest(float(second), 200, 2) for second in range(40)]
    return quiet + [TracedRequest(40 + index / 8, 200, 2) for index in range(320)]


def settings(gpus: int = 6, startup_s: float = STARTUP_S) -> ServiceSettings:
    return service(is_disaggregated=True, gpus=gpus, startup_s=startup_s)


@cache
def of_step() -> Oracle:
    return find_oracle(step, settings(), QUICK)


def met(oracle: Oracle) -> tuple[float, float]:
    outcome = oracle.result.outcome
    return outcome.attainment(outcome.ttft_met), outcome.attainment(outcome.itl_met)


# -- what it finds -------------------------------------------------------------------------------------


def test_it_meets_both_targets_for_as_many_requests_as_asked() -> None:
    oracle = of_step()
    assert oracle.verdict.is_slo_met
    assert min(met(oracle)) >= 0.95
    assert oracle.result.policy == "oracle"


def test_workers_are_started_a_start_before_the_load_comes() -> None:
    entries = of_step().schedule
    assert entries[0] == (0.0, workers(1, 1))
    assert 40 - STARTUP_S <= entries[1][0] <= 40 - STARTUP_S + 3  # in 3 s come more than may miss
    assert entries[1][1].prefill >= 2


def test_no_static_schedule_that_meets_the_slo_is_cheaper() -> None:
    oracle = of_step()
    for prefill in (1, 2, 3):
        outcome = simulate(step(), settings(), workers(prefill, 1), StaticPolicy())
        attained = outcome.outcome.attainment(outcome.outcome.ttft_met)
        assert attained < 0.95 or outcome.gpu_hours >= oracle.result.gpu_hours


def test_it_is_not_below_its_lower_bound() -> None:
    oracle = of_step()
    bound = oracle.verdict.lower_bound_gpu_hours
    assert bound is not None
    assert 0 < bound <= oracle.result.gpu_hours


def test_a_trace_with_shared_prefixes_has_no_lower_bound_and_says_why() -> None:
    trace = [TracedRequest(float(second), 200, 2, (1, 2, 3), 16) for second in range(20)]
    verdict = find_oracle(lambda: trace, settings(), OracleOptions(effort=1)).verdict
    assert verdict.lower_bound_gpu_hours is None
    assert "share prefixes" in verdict.no_lower_bound


def test_its_schedule_gives_its_result_again() -> None:
    oracle = of_step()
    policy = SchedulePolicy("again", oracle.schedule)
    again = simulate(step(), settings(), oracle.schedule[0][1], policy)
    assert again.gpu_hours == oracle.result.gpu_hours
    assert again.outcome.ttft_met == oracle.result.outcome.ttft_met


def test_the_same_trace_has_the_same_oracle() -> None:
    again = find_oracle(step, settings(), QUICK)
    assert again.schedule == of_step().schedule
    assert again.simulations == of_step().simulations


def test_a_lower_percentile_costs_no_more() -> None:
    lenient = find_oracle(step, settings(), OracleOptions(percentile=80, effort=2))
    assert lenient.verdict.is_slo_met
    assert lenient.result.gpu_hours <= of_step().result.gpu_hours


def test_aggregated_workers_are_scheduled_too() -> None:
    oracle = find_oracle(step, service(startup_s=STARTUP_S, gpus=6), QUICK)
    assert oracle.verdict.is_slo_met
    assert all(wanted.prefill == 0 for _, wanted in oracle.schedule)
    assert oracle.schedule[0][1].decode < oracle.schedule[-1][1].decode + 1


def test_what_no_number_of_workers_can_serve_is_told_and_as_little_missed_as_found() -> None:
    def flood() -> list[TracedRequest]:
        return every(0.02, 200, prompt_tokens=400, output_tokens=2)

    oracle = find_oracle(flood, settings(gpus=3), QUICK)
    assert not oracle.verdict.is_slo_met
    best = simulate(flood(), settings(gpus=3), workers(2, 1), StaticPolicy())
    assert oracle.result.outcome.ttft_met >= best.outcome.ttft_met


def test_it_simulates_no_more_than_its_effort_and_the_last_static_ones() -> None:
    assert of_step().simulations <= QUICK.effort + 4


@pytest.mark.parametrize("trace", [[], [TracedRequest(0.0, 100, 5)], at_once([(0, 5), (100, 11)])])
def test_next_to_nothing_needs_the_minimum(trace: list[TracedRequest]) -> None:
    oracle = find_oracle(lambda: trace, settings(), QUICK)
    assert [wanted for _, wanted in oracle.schedule] == [workers(1, 1)]


def test_the_gpu_budget_is_never_exceeded() -> None:
    oracle = find_oracle(step, settings(gpus=3), QUICK)
    assert all(wanted.prefill + wanted.decode <= 3 for _, wanted in oracle.schedule)


# -- schedules -----------------------------------------------------------------------------------------

LEVELS = st.lists(st.integers(1, 5), min_size=1, max_size=40)


def timing(count: int, startup_s: float = 10.0, gpus: int = 1) -> WindowTiming:
    return WindowTiming(width_s=5, windows=count, end_s=5.0 * count, gpus=gpus, startup_s=startup_s)


def test_a_gap_as_long_as_a_start_is_filled_and_a_longer_one_is_not() -> None:
    assert filled([2, 2, 2, 1, 1, 2], timing(6)) == [2, 2, 2, 2, 2, 2]
    assert filled([2, 2, 2, 1, 1, 1, 2], timing(7)) == [2, 2, 2, 1, 1, 1, 2]


def test_nothing_can_be_started_before_the_trace_begins() -> None:
    assert filled([1, 1, 3, 1, 1], timing(5)) == [3, 3, 3, 1, 1]


def test_a_start_costs_its_time() -> None:
    assert gpu_seconds([1, 1, 1, 2], timing(4, gpus=2)) == 2 * (3 * 5 + 2 * 5 + 10)


def test_a_schedule_wants_a_worker_a_start_early_and_lets_it_go_on_time() -> None:
    levels = {Role.DECODE: [1, 1, 1, 1, 2, 1]}
    entries = schedule(levels, {Role.DECODE: timing(6)})
    assert entries == [(0.0, workers(0, 1)), (10.0, workers(0, 2)), (25.0, workers(0, 1))]


@given(LEVELS, st.sampled_from([0.0, 3.0, 5.0, 12.0, 60.0]))
def test_filling_takes_nobody_away_and_once_is_enough(levels: list[int], startup_s: float) -> None:
    full = filled(levels, timing(len(levels), startup_s))
    assert all(after >= before for after, before in zip(full, levels, strict=True))
    assert filled(full, timing(len(levels), startup_s)) == full


@given(LEVELS, st.sampled_from([0.0, 3.0, 5.0, 12.0]))
def test_what_a_schedule_wants_holds_as_long_as_its_workers_serve_and_start(
    levels: list[int], startup_s: float
) -> None:
    one = timing(len(levels), startup_s)
    full = filled(levels, one)
    entries = schedule({Role.DECODE: full}, {Role.DECODE: one})
    held_s, ends = 0.0, [at_s for at_s, _ in entries[1:]] + [one.end_s]
    for (at_s, wanted), end_s in zip(entries, ends, strict=True):
        held_s += wanted.decode * (end_s - at_s)
    assert held_s == pytest.approx(gpu_seconds(full, one))


# -- the way through the windows -----------------------------------------------------------------------


def test_the_path_keeps_a_worker_where_a_start_is_dearer_than_the_gap() -> None:
    busy, quiet = [(9, 0), (0, 0)], [(0, 0), (0, 0)]
    prices = Prices(100.0, 100.0)

    def path(gap: int) -> list[int]:
        table = [busy] * 3 + [quiet] * gap + [busy]
        return cheapest_levels(table, timing(len(table)), prices, [2] * len(table), drain_s=0.0)[0]

    assert path(1) == [2] * 5
    assert path(4) == [2] * 3 + [1] * 4 + [2]


def test_the_path_misses_what_is_dearer_to_save() -> None:
    table = [[(0, 0), (0, 0)], [(0, 0), (0, 0)], [(0, 0), (0, 0)], [(3, 0), (0, 0)]]
    levels, missed = cheapest_levels(table, timing(4), Prices(1.0, 1.0), [2] * 4, drain_s=0.0)
    assert (levels, missed.ttft) == ([1, 1, 1, 1], 3)


def test_the_path_keeps_to_caps() -> None:
    table = [[(9, 0), (0, 0)]] * 4
    levels, _ = cheapest_levels(table, timing(4), Prices(100.0, 100.0), [2, 1, 2, 2], drain_s=0.0)
    assert levels[1] == 1


def test_wanted_numbers_are_those_of_both_roles() -> None:
    levels = {Role.PREFILL: [1, 2], Role.DECODE: [3, 1]}
    entries = schedule(levels, {role: timing(2, startup_s=0.0) for role in levels})
    assert entries == [(0.0, Targets(1, 3)), (5.0, Targets(2, 1))]
