"""What is said of the planner's next decision after counts were set by hand."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.cli.scaling.afterwards import planners_part
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.fleet.holds import Hold, RoleHolds
from dynaplan.fleet.store_keys import DesiredCounts
from dynaplan.planner import factory
from dynaplan.planner.model.decisions import DecisionRecord, PlannerState
from dynaplan.planner.rules.deciding import decide
from tests.unit.planner.rules import targets
from tests.unit.planner.rules.situations import interval

SETTINGS = PlannerSettings(adjustment_interval_s=10.0)
TWO = DesiredCounts(-1, 2, 2, 1)


def record(settings: PlannerSettings, ago_s: float = 3.0, **changes: Any) -> dict[str, Any]:
    """What the planner wrote down of an interval with one idle decode worker."""
    seen = replace(interval(0, 1, kv=0.0), **changes)
    model = targets.model() if settings.is_by_targets else None
    state, decision = decide(settings, PlannerState(), seen, model)
    at = datetime.now().astimezone() - timedelta(seconds=ago_s)
    return DecisionRecord(at.isoformat(), settings, PlannerState(), seen, decision, state).to_json()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Write a record as the last one, and return the sentence."""

    def say(document: dict[str, Any] | None, settings: PlannerSettings = SETTINGS, **options: Any) -> str:
        documents = [] if document is None else [document]
        monkeypatch.setattr(factory, "recent_decisions", lambda directory, last: documents)
        found: Any = SimpleNamespace(log_dir=tmp_path)
        return planners_part(found, settings, TWO, options.pop("holds", RoleHolds()), **options)

    return say


def test_it_says_what_the_planner_would_ask_for_and_why(said) -> None:
    assert said(record(SETTINGS)) == (
        "The planner decides again 10 s after this is carried out. With the load that it saw last it would "
        "ask for decode=1: the mean KV usage 0 is below 0.5: one decode worker fewer."
    )


def test_it_says_that_a_number_would_be_kept(said) -> None:
    sentence = said(record(SETTINGS), holds=RoleHolds(decode=Hold(2)))
    assert sentence.endswith("it would keep that, and may change it later.")


def test_after_a_release_the_next_decision_comes_with_the_interval(said) -> None:
    assert "decides again in 7 s." in said(record(SETTINGS), is_decision=False)
    assert "decides again within 10 s." in said(record(SETTINGS, ago_s=60.0), is_decision=False)


def test_targets_are_planned_for_in_even_intervals(said) -> None:
    settings = replace(targets.SETTINGS, adjustment_interval_s=10.0)
    assert "decides again in 7 s. With the load" in said(record(settings), settings)


@pytest.mark.parametrize("document", [None, {}, {"wall_time": 7}])
def test_without_a_record_it_says_only_when(said, document: dict[str, Any] | None) -> None:
    assert said(document) == (
        "The planner decides again 10 s after this is carried out, and may change that."
    )


def test_an_interval_in_which_nothing_was_known_and_a_profile_that_is_gone_tell_nothing(said) -> None:
    assert said(record(SETTINGS, unknown="the store is away")).endswith(", and may change that.")
    settings = replace(targets.SETTINGS)
    document = record(settings)
    document["settings"]["profile-results-dir"] = "/nowhere"
    assert said(document, settings).endswith(", and may change that.")
