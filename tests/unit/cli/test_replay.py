"""``dynaplan replay`` as a user calls it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from dynaplan.cli.main import group
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.util.errors import ConfigError
from tests.unit.planner.rules.situations import interval
from tests.unit.planner.rules.targets import SETTINGS, planned_interval
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


def test_of_targets_it_says_how_the_size_that_stays_came_about(tmp_path):
    seen = [planned_interval(2, 1, [20.0], at_s=10.0 * number) for number in range(2)]
    recorded(tmp_path, SETTINGS, seen)
    result = run(tmp_path, "--Planner.ttft=120")
    (told,) = {line for line in result.output.splitlines() if line.startswith("  recorded   no change")}
    assert "with 2" in told
    assert "TTFTs are over" in told
    assert "budget" not in told


def test_it_says_what_would_have_been_set_of_running_workers(tmp_path):
    recorded(tmp_path, SETTINGS, [planned_interval(2, 1, [20.0])])
    result = run(tmp_path, "--Planner.max-running-requests=5")
    assert "replayed   running limit: 5 at once on a worker" in " ".join(result.output.split("\n"))


def test_it_takes_the_file_as_well_and_gives_json(log_dir):
    result = run(log_dir / "decisions.jsonl", "--all", "--json")
    shown = [json.loads(line) for line in result.output.splitlines()]
    assert [each["is_same"] for each in shown] == [True] * 3
    assert shown[0]["recorded"]["desired"] == {"prefill": 1, "decode": 3}


def test_it_finds_the_newest_recording_from_every_directory_that_serve_prints(tmp_path):
    planner = tmp_path / "planner"
    for name, usages in (("20260101_1", (0.95,)), ("20260101_2", (0.95, 0.85))):
        log_dir = planner / name
        recorded(log_dir, PlannerSettings(), [interval(1, 2, usage) for usage in usages])
    for path in (tmp_path, planner, planner / "20260101_2", planner / "20260101_2" / "decisions.jsonl"):
        assert run(path).output.startswith("2 intervals")
    (planner / "current").write_text(f"{planner / '20260101_1'}\n")
    for path in (tmp_path, planner, planner / "current"):
        assert run(path).output.startswith("1 intervals")


def test_a_directory_without_a_recording_is_answered_with_where_one_is(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no decisions\n.*log directory"):
        run(tmp_path)
