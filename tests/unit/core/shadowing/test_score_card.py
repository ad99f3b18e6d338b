"""The score card."""

from __future__ import annotations

import pytest

from dynaplan.core.shadowing.score_card import Difference, Tolerances, card_rows, shadowed_intervals, verdict
from dynaplan.domain.planning.decisions import Decision, DecisionRecord, PlannerState, ShadowRecord
from dynaplan.domain.planning.score import PolicyScore
from dynaplan.domain.planning.targets import Step, Targets
from dynaplan.domain.settings.planner import PlannerSettings
from tests.unit.core.planning.situations import interval

OLD = PolicyScore(1000, 100, 36_000, 4, 3600)


@pytest.mark.parametrize(
    ("new", "told", "is_worse"),
    [
        (PolicyScore(1000, 50, 36_000), "better: 5.0 points more in time, with 0.0 % more GPU hours", False),
        (
            PolicyScore(1000, 100, 28_800),
            "better: 0.0 points more in time, with 20.0 % fewer GPU hours",
            False,
        ),
        (PolicyScore(1000, 120, 36_000), "worse: 2.0 points fewer in time", True),
        (PolicyScore(1000, 100, 39_600), "worse: 0.0 points more in time, with 10.0 % more GPU hours", True),
        (
            PolicyScore(1000, 120, 18_000),
            "worse: 2.0 points fewer in time, with 50.0 % fewer GPU hours",
            True,
        ),
        (PolicyScore(1000, 50, 39_600), "better for requests, and dearer: 5.0 points more", False),
        (PolicyScore(1000, 95, 36_500), "as good, within what the model can tell", False),
    ],
)
def test_the_verdict_weighs_requests_in_time_against_gpu_hours(new, told, is_worse):
    assert told in verdict("It", OLD, new)
    assert Difference.between(OLD, new).is_worse(Tolerances()) is is_worse


def test_without_requests_there_is_no_verdict():
    assert "no requests yet" in verdict("It", PolicyScore(), PolicyScore())
    assert Difference.between(PolicyScore(), OLD) == Difference(0, 0)
    assert card_rows({"live": PolicyScore()})[1][1] == "-"


def test_recorded_decisions_of_both_are_told_side_by_side():
    stays = Decision(Targets(1, 1), Targets(1, 1), (Step("known", Targets(1, 1), Targets(1, 1), "quiet"),))
    grows = Decision(Targets(1, 1), Targets(2, 1), (Step("sla", Targets(1, 1), Targets(2, 1), "a surge"),))
    shadow = ShadowRecord({"policy": "sla"}, grows, "12:00", OLD, OLD)
    settings, state, seen = PlannerSettings(), PlannerState(), interval(1, 1)
    beside = DecisionRecord("12:01", settings, state, seen, stays, state, shadow).to_json()
    alone = DecisionRecord("12:02", settings, state, seen, stays, state).to_json()
    (told,) = shadowed_intervals([{"no": "record"}, beside, alone])
    assert told.live == "no change (prefill 1, decode 1): quiet"
    assert told.shadow == "prefill 1, decode 1 -> prefill 2, decode 1: a surge"
    assert told.options == "policy: sla"
