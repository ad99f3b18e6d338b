"""A record in words."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.traffic import Traffic
from dynaplan.planner.model import DecisionRecord, Expected, Observation, PlannerState, TrafficForecast
from dynaplan.planner.rules.decision import decide
from dynaplan.planner.rules.explain import explain, is_change, summarize
from tests.unit.planner.rules.situations import interval
from tests.unit.planner.rules.targets import H200, SETTINGS, model, planned_interval


def told(observation: Observation, settings: PlannerSettings | None = None) -> str:
    settings = settings or PlannerSettings()
    next_state, decision = decide(settings, PlannerState(), observation)
    record = DecisionRecord(
        "2026-01-01T12:00:00+00:00", settings, PlannerState(), observation, decision, next_state
    )
    return explain(json.loads(json.dumps(record.to_json())))


def test_no_change_says_what_it_would_have_taken():
    text = told(interval(1, 1, 0.7, (0.3,)))
    assert text.startswith("2026-01-01T12:00:00+00:00  no change (prefill 1, decode 1)")
    assert "prefill: would scale up at queue per worker > 0.5, down at < 0.2; was 0.3" in text
    assert "decode: would scale up at KV usage > 0.9, down at < 0.5; was 0.7" in text


def test_a_change_names_the_step_that_made_it():
    text = told(interval(1, 1, 0.95, (0.3,)))
    assert "changed prefill 1, decode 1 -> prefill 1, decode 2" in text
    assert "changed    decode scale up: the mean KV usage 0.95 is above 0.9: one decode worker more" in text


def test_a_usage_above_the_whole_cache_is_explained():
    assert "mean KV usage 1.04 (each request that waits adds 0.02)\n" in told(interval(1, 1, 1.04))
    assert "mean KV usage 0.95\n" in told(interval(1, 1, 0.95))


def test_no_operation_says_would_have():
    assert "would have changed" in told(interval(1, 1, 0.95), PlannerSettings(no_operation=True))


def test_no_data_says_so():
    text = told(interval(0, 1, None))
    assert "no KV usage: no decode worker answered" in text
    assert "there was no data" in text
    assert "prefill:" not in text


def test_a_decision_that_was_not_carried_out_is_told():
    text = told(replace(interval(1, 1), failure="etcd is away"))
    assert "the decision before was not carried out: etcd is away" in text


def test_sleeping_workers_are_named():
    observed = interval(1, 3)
    text = told(replace(observed, load=replace(observed.load, decode_workers=2, decode_asleep=1)))
    assert "1 prefill and 2 decode workers registered, and asleep 1 decode (`dynaplan wake`)" in text
    text = told(replace(observed, load=replace(observed.load, prefill_asleep=1, decode_asleep=2)))
    assert "registered, and asleep 1 prefill and 2 decode (`dynaplan wake`)" in text


def test_nonsense_is_said_to_be_so():
    for document in ({}, {"wall_time": 1}, {"settings": {"colour": "blue"}, "wall_time": ""}):
        assert explain(document).startswith("a record that cannot be read")


def test_a_change_is_told_from_none_and_from_nonsense():
    for observation, changes in ((interval(1, 1, 0.95), True), (interval(1, 1, 0.7), False)):
        _, decision = decide(PlannerSettings(), PlannerState(), observation)
        assert is_change({"decision": asdict(decision)}) is changes
    assert not any(map(is_change, ({}, {"decision": None}, {"decision": {}}, {"decision": 7})))


def test_the_traffic_and_its_forecast_are_told():
    observation = replace(
        interval(1, 1),
        traffic=Traffic(10.0, 20.0, 3000.0, itl_ms=8.0),
        foresight=TrafficForecast(10.0, (Expected(30.0, ahead=2, why="trend"), Expected(None, ahead=3))),
    )
    text = told(observation)
    assert "2 requests/s, ISL 3000, ITL 8 ms on average" in text
    assert "3 requests/s expected in 20 s (trend)" in text
    assert "in 30 s" not in text


def test_no_traffic_says_why():
    text = told(replace(interval(1, 1), traffic=Traffic(10.0, missing="no frontend answered")))
    assert "no traffic: no frontend answered" in text


def test_the_prediction_of_a_plan_is_told():
    settings = replace(SETTINGS, profile_results_dir=H200)
    observation = planned_interval(1, 1, [5.0])
    next_state, decision = decide(settings, PlannerState(), observation, model(settings))
    record = DecisionRecord("now", settings, PlannerState(), observation, decision, next_state)
    assert "expected then: TTFT" in explain(record.to_json())


def test_what_caches_save_is_told():
    observation = replace(
        interval(1, 1),
        traffic=Traffic(10.0, 20.0, 3000.0, prefix_hit_rate=0.8),
        foresight=TrafficForecast(10.0, (Expected(30.0),), prefix_hit_rate=0.75),
    )
    text = told(observation)
    assert "ISL 3000, 80% of the prompts cached on average" in text
    assert "25% of the prompts' tokens expected to be computed" in text
    assert "cached" not in told(replace(interval(1, 1), traffic=Traffic(10.0, 20.0, prefix_hit_rate=0.0)))


def test_one_line_has_the_time_the_decision_and_its_reason():
    settings, observation = PlannerSettings(), interval(1, 1, 0.95, (0.3,))
    next_state, decision = decide(settings, PlannerState(), observation)
    record = DecisionRecord(
        "2026-01-01T12:34:56+00:00", settings, PlannerState(), observation, decision, next_state
    )
    assert summarize(json.loads(json.dumps(record.to_json()))) == (
        "12:34:56  changed prefill 1, decode 1 -> prefill 1, decode 2: "
        "the mean KV usage 0.95 is above 0.9: one decode worker more"
    )
    assert summarize({"wall_time": "12"}) == ""
