"""A record in words."""

from __future__ import annotations

import json
from dataclasses import replace

from dynaplan.core.planning.deciding import decide
from dynaplan.core.planning.explaining import explain
from dynaplan.domain.planning.decisions import DecisionRecord, PlannerState
from dynaplan.domain.planning.observation import Observation
from dynaplan.domain.settings.planner import PlannerSettings
from tests.unit.core.planning.situations import interval


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


def test_nonsense_is_said_to_be_so():
    for document in ({}, {"wall_time": 1}, {"settings": {"colour": "blue"}, "wall_time": ""}):
        assert explain(document).startswith("a record that cannot be read")
