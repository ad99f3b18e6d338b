"""Which option of the engines a backtest finds, and when it is sure of the gain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.engines.timing_model.engine_model import EngineSettings
from dynaplan.planner.backtesting.backtest import simulated_service
from dynaplan.planner.backtesting.option_trials import EngineOption, options_to_try, try_options
from dynaplan.planner.backtesting.record import ServedRecord
from dynaplan.planner.backtesting.search import Search
from dynaplan.planner.model import OptionTrial, WorkerLimits
from tests.unit.planner.backtesting.windows import given_window
from tests.unit.planner.rules.targets import SETTINGS, model

ONE = PoolSizes(0, 1)


def sized(slots: int, step_tokens: int = 8192) -> PlannerSettings:
    return replace(SETTINGS, itl_ms=30.0, decode_max_num_seqs=slots, decode_step_limit_tokens=step_tokens)


def searched(settings: PlannerSettings, requests_per_s: float = 8.0, seconds: int = 120) -> Search:
    requests = [TracedRequest(n / requests_per_s, 3000, 150) for n in range(round(requests_per_s * seconds))]
    limits = WorkerLimits(8, least=ONE)
    service = simulated_service(model(settings).service_for(ONE), settings, limits)
    return Search(service, given_window(requests), 0.05, ONE, limits)


def found(settings: PlannerSettings, requests_per_s: float = 8.0, seconds: int = 120) -> OptionTrial | None:
    return try_options(searched(settings, requests_per_s, seconds), settings)


def test_too_few_requests_at_once_are_found_and_what_more_of_them_would_have_kept() -> None:
    trial = found(sized(slots=8))
    assert trial
    assert (trial.component, trial.option, trial.value_before, trial.value_after) == (
        "VllmWorker",
        "max-num-seqs",
        8,
        16,
    )
    assert trial.is_certain
    assert trial.in_time_after > trial.in_time_before + 0.3


def test_of_a_deployment_that_keeps_its_promise_nothing_is_certain() -> None:
    trial = found(sized(slots=64))
    assert trial
    assert trial.in_time_before > 0.99
    assert not trial.is_certain


def test_a_gain_within_chance_is_not_certain() -> None:
    few = found(sized(slots=8), seconds=2)
    assert few
    assert not few.is_certain


def test_an_option_that_an_engine_has_a_default_of_its_own_for_is_not_tried() -> None:
    assert found(replace(SETTINGS, itl_ms=30.0)) is None
    trial = found(replace(sized(slots=8), decode_max_num_seqs=None))
    assert trial is None or trial.option == "max-num-batched-tokens"


def test_a_window_without_requests_says_nothing_of_any_option() -> None:
    assert found(sized(slots=8), seconds=0) is None


def test_the_parts_in_time_are_held_to_the_record() -> None:
    search = searched(sized(slots=8))
    held = replace(search, record=ServedRecord(ttft_shift=1.0))
    free, shifted = try_options(search, sized(slots=8)), try_options(held, sized(slots=8))
    assert free
    assert shifted
    assert shifted.in_time_before < free.in_time_before


def test_prefill_workers_have_the_step_of_prompts_where_there_are_any() -> None:
    assert [each.role.value for each in options_to_try(is_disaggregated=True)] == ["prefill", "decode"]
    assert [each.role.value for each in options_to_try(is_disaggregated=False)] == ["decode", "decode"]


@pytest.mark.parametrize("option", options_to_try(is_disaggregated=True), ids=lambda each: each.name)
@given(tokens=st.integers(1, 1 << 20), slots=st.integers(1, 1 << 14))
def test_a_step_always_has_room_for_a_token_of_each_request(
    option: EngineOption, tokens: int, slots: int
) -> None:
    sizes = EngineSettings(1, batched_tokens=max(tokens, slots), request_slots=slots)
    for value in option.values_beside(sizes):
        changed = replace(sizes, **{option.field: value})
        assert changed.batched_tokens >= changed.request_slots >= 1
        assert changed != sizes
