"""An interval that adapts, in virtual time: help for a surge is asked for before the interval is over.

The engines are four times as slow as the profile, as in ``test_policies_calm.py``.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from dynaplan import wiring
from dynaplan.core.sizing.early_signs import USUAL_COST_S, least_gap_s
from dynaplan.domain.planning.decisions import Decision, PlannerState
from dynaplan.domain.planning.observation import Observation
from dynaplan.domain.planning.targets import Targets
from dynaplan.domain.trace import TracedRequest
from dynaplan.options.planner import settings_of
from dynaplan.simulator.options import EVERY_PROMPT_REMOTE, SimulateOptions
from dynaplan.simulator.policies import PlannerPolicy
from dynaplan.simulator.run import Result, simulate
from dynaplan.simulator.shell.simulation import service_settings
from tests.unit.simulator.test_policies_calm import ENGINE, H200, SLO

SURGE_S, END_S, INTERVAL_S = 130.0, 360.0, 60.0
SURGE = [
    TracedRequest(number / 2, 3000, 20)
    if number < 2 * SURGE_S
    else TracedRequest(number / 8 + 97.5, 3000, 20)
    for number in range(2 * int(SURGE_S) + 8 * int(END_S - SURGE_S))
]
"""Two requests a second, and eight from ``SURGE_S`` on."""


def surged(**options: object) -> tuple[Result, list[tuple[float, str, Decision]]]:
    """The result, and every decision with its time and why it was early."""
    decisions: list[tuple[float, str, Decision]] = []

    def decided(_: PlannerState, seen: Observation, decision: Decision, __: PlannerState) -> None:
        decisions.append((seen.at_s, seen.early, decision))

    dispatched = replace(EVERY_PROMPT_REMOTE, prefill_deadline_ms=SLO.ttft_ms)
    service = SimulateOptions("", startup_time_s=20.0, slo=SLO, engine=ENGINE, disaggregation=dispatched)
    targets = {"policy": "sla", "profile-results-dir": H200, "ttft": SLO.ttft_ms, "itl": SLO.itl_ms}
    settings = settings_of({**targets, "adjustment-interval": INTERVAL_S, **options})
    model = wiring.planning.sla_model(settings, ENGINE)
    policy = PlannerPolicy("sla", settings, model, on_decision=decided)
    return simulate(SURGE, service_settings(service), Targets(1, 1), policy), decisions


def test_a_surge_is_answered_within_the_interval_and_more_requests_are_in_time() -> None:
    fixed, at_ends = surged()
    adaptive, decisions = surged(**{"adaptive-interval": True})
    assert not any(early for _, early, _ in at_ends)
    helped_s = [at_s for at_s, early, each in decisions if early and each.is_change]
    assert SURGE_S < helped_s[0] < SURGE_S + INTERVAL_S / 4
    assert adaptive.outcome.both_met > 1.1 * fixed.outcome.both_met


def test_early_decisions_are_apart_by_what_they_cost_and_the_others_stay_in_even_intervals() -> None:
    _, decisions = surged(**{"adaptive-interval": True})
    assert [at_s for at_s, early, _ in decisions if not early][:6] == [60, 120, 180, 240, 300, 360]
    times_s = [at_s for at_s, _, _ in decisions]
    apart_s = [now_s - last_s for last_s, now_s in pairwise(times_s)]
    early = [bool(why) for _, why, _ in decisions][1:]
    assert min(apart for apart, is_early in zip(apart_s, early, strict=True) if is_early) >= least_gap_s(
        USUAL_COST_S
    )
