"""``dynaplan replay --gate`` as a user calls it."""

from __future__ import annotations

import json

from tests.unit.cli.test_replay import run
from tests.unit.core.planning.targets import SETTINGS, planned_interval
from tests.unit.planner.test_replay import recorded

GATED = [planned_interval(2, 1, [rate], at_s=10.0 * number) for number, rate in enumerate((20.0, 60.0) * 4)]


def test_the_gate_passes_the_recorded_options_and_prints_both_scores(tmp_path):
    recorded(tmp_path, SETTINGS, GATED)
    result = run(tmp_path, "--gate")
    assert result.exit_code == 0
    assert "8 intervals" in result.output
    assert "recorded options" in result.output
    assert "as good, within what the model can tell" in result.output


def test_the_gate_fails_with_1_where_the_new_options_do_worse(tmp_path):
    recorded(tmp_path, SETTINGS, GATED)
    worse = ["--gate", "--Planner.max-gpu-budget=2"]
    result = run(tmp_path, *worse)
    assert result.exit_code == 1
    assert "The new options would have been worse" in result.output
    assert run(tmp_path, *worse, "--may-lose=100").exit_code == 0
    as_json = run(tmp_path, *worse, "--json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.output)["is_worse"] is True
