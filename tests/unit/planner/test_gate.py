"""Recorded traffic with other settings, each with workers of their own."""

from __future__ import annotations

import pytest

from dynaplan.domain.errors import ConfigError
from dynaplan.domain.settings.planner import PlannerSettings
from dynaplan.planner.gate import compare
from tests.unit.core.planning.situations import interval
from tests.unit.core.planning.targets import SETTINGS, planned_interval
from tests.unit.planner.test_replay import recorded

RATES = (10.0, 40.0, 80.0, 80.0, 80.0, 80.0, 10.0, 10.0)


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    seen = [planned_interval(2, 1, [rate], at_s=10.0 * number) for number, rate in enumerate(RATES)]
    return recorded(tmp_path_factory.mktemp("log"), SETTINGS, seen)


def test_the_same_settings_fare_the_same(recording):
    compared = compare(recording, {})
    assert compared.old == compared.new
    assert compared.intervals == len(RATES)
    assert compared.served.requests == compared.old.requests == sum(RATES[1:]) * 10


def test_fewer_gpus_have_more_late_and_cost_less(recording):
    small = compare(recording, {"max-gpu-budget": 2})
    assert small.new.late > small.old.late
    assert small.new.gpu_s < small.old.gpu_s


def test_both_are_judged_by_the_recorded_promise_whatever_the_new_one_is(tmp_path):
    seen = [planned_interval(4, 1, [30.0], at_s=10.0 * number) for number in range(5)]
    loose = compare(recorded(tmp_path, SETTINGS, seen), {"ttft": 5000, "itl": 200})
    assert loose.new.late > loose.old.late
    assert loose.new.gpu_s < loose.old.gpu_s


def test_a_changed_setting_on_the_way_is_another_beginning(recording, tmp_path):
    seen = [planned_interval(2, 1, [10.0], at_s=10.0 * number) for number in range(3)]
    path = recorded(tmp_path, SETTINGS, seen)
    recorded(tmp_path, PlannerSettings.from_options({**SETTINGS.to_options(), "ttft": 600}), seen)
    assert compare(path, {}).served.requests == 2 * 200


def test_a_recording_without_traffic_cannot_be_compared(tmp_path):
    settings = PlannerSettings(profile_results_dir=SETTINGS.profile_results_dir)
    path = recorded(tmp_path, settings, [interval(1, 2, 0.9)])
    with pytest.raises(ConfigError, match="nothing can be compared"):
        compare(path, {})


def test_thresholds_are_judged_by_the_promise_of_the_shadow_that_was_recorded(tmp_path):
    profile = SETTINGS.profile_results_dir
    options = {"shadow": {"policy": "sla", "profile-results-dir": profile}, "adjustment-interval": 10}
    seen = [planned_interval(1, 1, [20.0], kv=0.95, at_s=10.0 * number) for number in range(4)]
    path = recorded(tmp_path, PlannerSettings.from_options(options), seen)
    compared = compare(path, {"decode-kv-scale-up-threshold": 0.99})
    assert compared.new.gpu_s < compared.old.gpu_s
