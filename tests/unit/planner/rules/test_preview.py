"""The next decision on counts that somebody set by hand."""

from __future__ import annotations

from dataclasses import replace

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.fleet.counts import Targets
from dynaplan.fleet.holds import Hold, RoleHolds
from dynaplan.planner.model import DecisionRecord, Observation, PlannerState
from dynaplan.planner.rules.decision import decide, has_data, preview_decision
from tests.unit.planner.rules.situations import interval

SETTINGS = PlannerSettings()


def recorded(observation: Observation, state: PlannerState | None = None) -> DecisionRecord:
    before = state or PlannerState()
    after, decision = decide(SETTINGS, before, observation)
    return DecisionRecord("2026-01-01T00:00:00+00:00", SETTINGS, before, observation, decision, after)


def test_an_idle_worker_that_was_added_by_hand_would_be_removed() -> None:
    decision = preview_decision(recorded(interval(1, 1, kv=0.0)), Targets(1, 2), RoleHolds(), None)
    assert (decision.current, decision.desired) == (Targets(1, 2), Targets(1, 1))


def test_the_load_that_was_seen_is_spread_over_the_new_number() -> None:
    busy = recorded(interval(1, 1, kv=0.8))
    assert preview_decision(busy, Targets(1, 1), RoleHolds(), None).desired == Targets(1, 1)
    many = preview_decision(busy, Targets(1, 4), RoleHolds(), None)
    assert many.desired == Targets(1, 3)
    assert "0.2 is below 0.5" in many.reason
    fewer = preview_decision(recorded(interval(1, 4, kv=0.6)), Targets(1, 2), RoleHolds(), None)
    assert fewer.desired == Targets(1, 3)


def test_a_decision_that_was_still_carried_out_and_changes_in_the_interval_do_not_count() -> None:
    seen = interval(1, 1, kv=0.0)
    seen = replace(seen, desired=replace(seen.desired, decision_id=9), load=replace(seen.load, changed="yes"))
    assert preview_decision(recorded(seen), Targets(1, 2), RoleHolds(), None).desired == Targets(1, 1)


def test_what_is_held_stays() -> None:
    holds = RoleHolds(decode=Hold(2, 2))
    assert not preview_decision(recorded(interval(1, 1, kv=0.0)), Targets(1, 2), holds, None).is_change


def test_without_data_or_workers_nothing_is_foretold() -> None:
    last = recorded(interval(1, 1, kv=None))
    assert not preview_decision(last, Targets(1, 2), RoleHolds(), None).is_change
    assert preview_decision(recorded(interval(1, 1)), Targets(1, 0), RoleHolds(), None).current == Targets(
        1, 0
    )
    assert has_data(last.observation)
    assert not has_data(replace(last.observation, unknown="the store is away"))
