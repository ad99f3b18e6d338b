"""What a decision sets of running workers, and says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.running_limits import RunningLimit
from dynaplan.planner.learnt_timings import LearntTimings
from dynaplan.planner.model import DecisionRecord, PlannerState, Tuning
from dynaplan.planner.recorders.gauges import values_of
from dynaplan.planner.rules.decision import decide
from dynaplan.planner.rules.explain import explain
from dynaplan.util.errors import ConfigError
from tests.unit.planner.rules.situations import interval
from tests.unit.planner.rules.targets import SETTINGS, foreseen, model, traffic
from tests.unit.planner.rules.test_learnt import KNOWN, WITHOUT, seen

KNOWN_STEPS = LearntTimings(KNOWN, is_needed=True)
AUTO = replace(WITHOUT, max_running_requests="auto", itl_ms=8.0)
BEFORE = Tuning(RunningLimit(3, 1.0, 1.0))


def tuned(
    settings: PlannerSettings, learnt: LearntTimings = KNOWN_STEPS, before: Tuning | None = None
) -> tuple[Tuning, str]:
    state, observation = PlannerState(tuning=before or Tuning()), seen(learnt)
    after, made = decide(settings, state, observation, model(settings))
    record = DecisionRecord("2026-01-01T00:00:00+00:00", settings, state, observation, made, after)
    assert DecisionRecord.from_json(record.to_json()) == record
    return after.tuning, explain(record.to_json())


def test_the_limit_keeps_the_itl_target_and_stands_in_the_trail() -> None:
    tuning, why = tuned(AUTO)
    assert tuning.running_limit
    assert 1 < tuning.running_limit.most < 256
    assert f"running limit: {tuning.running_limit.most} at once on a worker" in why
    wider, _ = tuned(replace(AUTO, itl_ms=9.0))
    assert wider.running_limit
    assert wider.running_limit.most > tuning.running_limit.most


def test_a_number_is_the_limit_whatever_the_target() -> None:
    tuning, _ = tuned(replace(AUTO, max_running_requests=7))
    assert tuning.running_limit
    assert tuning.running_limit.most == 7


@pytest.mark.parametrize(
    ("itl_ms", "why"), [(3.0, "a request alone has an ITL of"), (500.0, "all 256 slots")]
)
def test_no_limit_where_it_would_keep_nothing(itl_ms: float, why: str) -> None:
    tuning, said = tuned(replace(AUTO, itl_ms=itl_ms), before=BEFORE)
    assert tuning == Tuning()
    assert why in said


def test_off_says_and_sets_nothing() -> None:
    tuning, why = tuned(WITHOUT, before=BEFORE)
    assert tuning == Tuning()
    assert "running limit" not in why


def test_without_known_steps_only_a_number_is_a_limit_and_measured_times_say_who_waits() -> None:
    unknown = LearntTimings(is_needed=True)
    assert tuned(AUTO, unknown, BEFORE)[0] == Tuning()
    tuning, why = tuned(replace(AUTO, max_running_requests=8), unknown)
    assert tuning.running_limit == RunningLimit(8, wait_s=0.25, ends_per_s=5.0)  # 1.6 s each, half of 500 ms
    assert "8 at once on a worker, as asked for" in why


def test_without_traffic_or_fleet_the_last_limit_stays() -> None:
    state = PlannerState(tuning=BEFORE)
    for change in ({"foresight": None, "traffic": None}, {"unknown": "the store is away"}):
        observation = replace(seen(KNOWN_STEPS), **change)  # type: ignore[arg-type]
        assert decide(AUTO, state, observation, model(AUTO))[0].tuning == BEFORE


def test_the_limit_is_a_gauge_and_a_curve() -> None:
    observation, state = seen(KNOWN_STEPS), PlannerState()
    after, made = decide(AUTO, state, observation, model(AUTO))
    numbers = values_of(DecisionRecord("", AUTO, state, observation, made, after))
    assert after.tuning.running_limit
    assert numbers["running_limit_requests"] == after.tuning.running_limit.most


def test_the_length_of_local_prompts_stands_in_the_trail_of_a_disaggregated_service() -> None:
    settings = replace(SETTINGS, max_local_prefill_length="auto")
    observation = interval(1, 2, 0.1)
    observation = replace(observation, traffic=traffic(2.0), foresight=foreseen([2.0]))
    after, made = decide(settings, PlannerState(), observation, model(settings))
    record = DecisionRecord("2026-01-01T00:00:00+00:00", settings, PlannerState(), observation, made, after)
    assert DecisionRecord.from_json(record.to_json()) == record
    assert after.tuning.max_local_prefill_tokens
    assert f"prompts of up to {after.tuning.max_local_prefill_tokens} tokens" in explain(record.to_json())
    assert values_of(record)["max_local_prefill_tokens"] == after.tuning.max_local_prefill_tokens


def test_an_aggregated_service_has_no_local_length() -> None:
    assert tuned(replace(WITHOUT, max_local_prefill_length="auto"))[0] == Tuning()


@pytest.mark.parametrize(
    "options",
    [
        {"max-running-requests": "auto"},
        {"max-running-requests": 4, "policy": "sla", "sizing": "formula"},
        {"max-running-requests": 0, "policy": "sla"},
        {"max-running-requests": "some", "policy": "sla"},
        {"max-local-prefill-length": "auto"},
        {"max-local-prefill-length": 100, "policy": "sla"},
    ],
)
def test_what_no_limit_can_be_made_of_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"(max-running-requests|max-local-prefill-length) is"):
        PlannerSettings.from_options(options)


@pytest.mark.parametrize(("given", "read"), [(False, "off"), ("off", "off"), ("auto", "auto"), (12, 12)])
def test_off_is_a_word_that_yaml_may_take_for_a_truth_value(given: object, read: object) -> None:
    options = {"max-running-requests": given, "policy": "sla"}
    assert PlannerSettings.from_options(options).max_running_requests == read
