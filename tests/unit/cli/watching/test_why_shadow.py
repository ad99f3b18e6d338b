"""``dynaplan why --shadow``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from dynaplan.adapters.recorders.jsonl import JsonLinesRecorder
from dynaplan.cli.main import group
from dynaplan.core.planning.deciding import decide
from dynaplan.domain.errors import UserError
from dynaplan.domain.planning.decisions import DecisionRecord, PlannerState
from tests.unit.core.planning.situations import interval
from tests.unit.core.planning.targets import SETTINGS
from tests.unit.core.shadowing.test_shadow import BY_LOAD, beside, rising


@pytest.fixture
def log_dir(tmp_path, monkeypatch):
    found = SimpleNamespace(log_dir=tmp_path, namespace="ns")
    monkeypatch.setattr("dynaplan.cli.watching.why.connect", lambda namespace: found)
    monkeypatch.setattr("dynaplan.foundation.screen.width", lambda: 0)
    return tmp_path


def why():
    return CliRunner().invoke(group, ["why", "--shadow", "-n", "2"], catch_exceptions=False)


def write(log_dir: Path, records: list[DecisionRecord]) -> None:
    recorder = JsonLinesRecorder(log_dir / "planner" / "20260101_120000")
    for record in records:
        recorder.decided(record)
    recorder.close()


def test_it_shows_both_decisions_and_the_score_card(log_dir):
    seen = rising(1, 1, [60.0] * 6)
    state, records = PlannerState(), []
    for observation, shadow in zip(seen, beside(BY_LOAD, SETTINGS, seen), strict=True):
        after, decision = decide(BY_LOAD, state, observation)
        records.append(DecisionRecord("2026-01-01", BY_LOAD, state, observation, decision, after, shadow))
        state = after
    write(log_dir, records)
    output = why().output
    assert output.count("  live       no change (prefill 1, decode 1)") == 2
    assert output.count("  shadow     ") == 2
    assert "3000 requests; the shadow has policy: sla" in output
    assert "The shadow would have been better for requests, and dearer" in output


def test_without_a_shadow_it_says_how_to_get_one(log_dir):
    seen = interval(1, 1)
    after, decision = decide(BY_LOAD, PlannerState(), seen)
    write(log_dir, [DecisionRecord("now", BY_LOAD, PlannerState(), seen, decision, after)])
    with pytest.raises(UserError, match="no shadow decides beside this planner"):
        why()
