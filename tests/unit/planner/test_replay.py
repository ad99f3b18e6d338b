"""Recorded observations, decided again."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.planner.model import DecisionRecord, Observation, PlannerState
from dynaplan.planner.recorders.decision_log import JsonLinesRecorder, read_recording
from dynaplan.planner.replay import replay
from dynaplan.planner.rules.decision import decide
from dynaplan.planner.rules.explain import explain
from dynaplan.util.errors import ConfigError
from tests.unit.planner.rules.situations import interval
from tests.unit.planner.rules.targets import SETTINGS, model, planned_interval

RATES = (2.0, 2.0, 20.0, 40.0, 40.0, 5.0, 2.0)


def recorded(log_dir, settings: PlannerSettings, observations: list[Observation]):
    """What a planner of those settings would have written of these intervals; where."""
    recorder = JsonLinesRecorder(log_dir)
    state, known = PlannerState(), model(settings) if settings.is_by_targets else None
    for number, observation in enumerate(observations):
        after, decision = decide(settings, state, observation, known)
        recorder.record_decision(
            DecisionRecord(
                f"2026-01-01T12:{number:02}:00+00:00", settings, state, observation, decision, after
            )
        )
        state = after
    for each in (recorder,):
        each.close()
    return log_dir / "decisions.jsonl"


@pytest.fixture(scope="module")
def by_targets(tmp_path_factory):
    seen = [planned_interval(2, 1, [rate], at_s=10.0 * number) for number, rate in enumerate(RATES)]
    return recorded(tmp_path_factory.mktemp("log"), SETTINGS, seen)


@pytest.fixture
def by_thresholds(tmp_path):
    usages = (0.95, 0.7, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3)
    seen = [interval(1, 2, usage, (0.3,), 30.0 * number) for number, usage in enumerate(usages)]
    return recorded(tmp_path, PlannerSettings(), seen)


@pytest.mark.parametrize("which", ["by_targets", "by_thresholds"])
def test_the_same_settings_decide_the_same_again(which, request):
    replayed = replay(request.getfixturevalue(which), {})
    assert replayed
    assert all(each.is_same and each.recorded == each.replayed for each in replayed)


def test_other_thresholds_decide_otherwise_and_say_why(by_thresholds):
    replayed = replay(by_thresholds, {"decode-kv-scale-up-threshold": 0.6})
    different = [each for each in replayed if not each.is_same]
    assert different
    assert "above 0.6" in different[0].replayed.reason


def test_a_stricter_target_needs_more_workers(by_targets):
    replayed = replay(by_targets, {"ttft": 120})
    assert any(each.replayed.desired.prefill > each.recorded.desired.prefill for each in replayed)


def test_what_other_settings_would_have_set_of_running_workers_is_a_difference(by_targets):
    replayed = replay(by_targets, {"max-running-requests": 5})
    assert all(each.recorded.desired == each.replayed.desired for each in replayed)
    assert not any(each.is_same for each in replayed)
    assert {each.replayed_tuning.running_limit.most for each in replayed} >= {6}


def test_another_predictor_foretells_anew(by_targets):
    replayed = replay(by_targets, {"load-predictor": "constant"})
    assert len(replayed) == len(RATES)
    # The recorded forecast was what the test told; the last value is the same here, told by another.
    assert replayed[3].replayed.desired == replayed[3].recorded.desired


def test_another_minimum_takes_the_place_of_the_recorded_one(by_thresholds):
    assert replay(by_thresholds, {"min_endpoint": 2})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"adjustment-interval": 60}, "adjustment-interval"),
        ({"policy": "sla", "profile-results-dir": SETTINGS.profile_results_dir}, "saw no traffic"),
        ({"decode-kv-scale-up-treshold": 1}, "decode-kv-scale-up-treshold"),
    ],
)
def test_what_the_record_cannot_answer_is_refused(by_thresholds, options, told):
    with pytest.raises(ConfigError, match=told):
        replay(by_thresholds, options)


def test_a_file_without_decisions_is_refused(tmp_path):
    path = tmp_path / "decisions.jsonl"
    path.write_text('{"some": "thing"}\n')
    with pytest.raises(ConfigError, match="line 1 is no decision"):
        replay(path, {})
    path.write_text("words\n")
    with pytest.raises(ConfigError, match="holds no decisions"):
        replay(path, {})


def test_a_line_of_a_planner_for_targets_without_its_settings_has_less_than_4_kb(by_targets):
    first, *others = by_targets.read_text().splitlines()
    assert max(map(len, others)) < 4000
    assert "settings" in first


@pytest.mark.parametrize("which", ["by_targets", "by_thresholds"])
def test_a_record_of_a_version_that_wrote_every_field_is_read(which, request, tmp_path):
    path = request.getfixturevalue(which)
    records, old = [], tmp_path / "old.jsonl"
    with old.open("w") as file:
        for _, document in read_recording(path):
            records.append(DecisionRecord.from_json(document))
            whole = asdict(records[-1])
            whole |= {"settings": document["settings"], "fingerprint": document["fingerprint"]}
            del whole["observation"]["holds"]
            file.write(json.dumps(whole) + "\n")
    assert old.stat().st_size > 1.5 * path.stat().st_size
    assert [DecisionRecord.from_json(document) for _, document in read_recording(old)] == records
    assert all(each.is_same for each in replay(old, {}))


OLD = Path(__file__).parents[2] / "fixtures" / "recordings" / "shadow_and_early_decisions.jsonl"
"""Written by a version with a shadow policy and decisions before the end of an interval: 5 lines, 2 early."""


def test_a_record_with_a_shadow_and_early_decisions_is_read_without_them():
    replayed = replay(OLD, {})
    assert [each.wall_time[14:16] for each in replayed] == ["00", "03", "04"]
    told = [explain(document) for _, document in read_recording(OLD)]
    assert len(told) == 5
    assert not [each for each in told if "cannot be read" in each]
    assert "early: decided before the end of the interval" in told[1]


def test_settings_that_changed_on_the_way_begin_anew(tmp_path):
    path = recorded(tmp_path, PlannerSettings(), [interval(1, 2, 0.95)])
    path = recorded(tmp_path, replace(PlannerSettings(), max_gpu_budget=3), [interval(1, 2, 0.95)])
    assert [each.is_same for each in replay(path, {})] == [True, True]
