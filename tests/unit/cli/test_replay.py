"""``dynaplan replay`` as a user calls it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from dynaplan.cli.main import group
from dynaplan.domain.planner_settings import PlannerSettings
from tests.unit.planner.situations import interval
from tests.unit.planner.test_replay import recorded


@pytest.fixture
def log_dir(tmp_path):
    recorded(tmp_path, PlannerSettings(), [interval(1, 2, usage) for usage in (0.95, 0.85, 0.7)])
    return tmp_path


def run(*arguments: object):
    return CliRunner().invoke(group, ["replay", *map(str, arguments)], catch_exceptions=False)


def test_it_shows_where_other_settings_decide_otherwise(log_dir):
    result = run(log_dir, "--Planner.decode-kv-scale-up-threshold=0.8")
    assert result.exit_code == 0
    assert result.output.count("replayed   -> prefill 1, decode 3") == 1
    assert "3 intervals, 1 decided otherwise (recorded 1 changes, replayed 2 changes)" in result.output


def test_it_takes_the_file_as_well_and_gives_json(log_dir):
    result = run(log_dir / "decisions.jsonl", "--all", "--json")
    shown = [json.loads(line) for line in result.output.splitlines()]
    assert [each["is_same"] for each in shown] == [True] * 3
    assert shown[0]["recorded"]["desired"] == {"prefill": 1, "decode": 3}
