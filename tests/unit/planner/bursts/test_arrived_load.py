"""What a finished interval demanded."""

from __future__ import annotations

from dataclasses import replace

from dynaplan.gateway.traffic import Lengths
from dynaplan.planner.bursts.arrived_load import arrived_demand, lasting_demand
from dynaplan.planner.model import Demand, Foresight
from dynaplan.planner.sizing.queueing.queueing_model import measured_demand
from tests.unit.planner.rules.targets import SETTINGS, traffic

ANSWERED = traffic(10.0)
UNANSWERED = replace(ANSWERED, isl=None, osl=Lengths((), ()))


def test_what_arrived_is_a_demand_though_nothing_was_answered() -> None:
    assert measured_demand(UNANSWERED) is None
    recent = Foresight(10.0, isl=Lengths.fixed(700.0), osl=Lengths.fixed(90.0))
    for foresight, isl, osl in (
        (recent, 700.0, 90.0),
        (None, SETTINGS.isl_tokens, SETTINGS.osl_tokens),
        (Foresight(10.0), SETTINGS.isl_tokens, SETTINGS.osl_tokens),
    ):
        demand = arrived_demand(UNANSWERED, foresight, SETTINGS)
        assert demand
        assert (demand.requests_per_s, demand.isl.mean_tokens, demand.osl.mean_tokens) == (10.0, isl, osl)


def test_measured_lengths_go_before_recent_ones_and_without_requests_there_is_no_demand() -> None:
    recent = Foresight(10.0, isl=Lengths.fixed(700.0), osl=Lengths.fixed(90.0))
    assert arrived_demand(ANSWERED, recent, SETTINGS) == measured_demand(ANSWERED)
    assert arrived_demand(replace(ANSWERED, requests=0.0), recent, SETTINGS) is None


def test_what_lasts_without_requests_has_the_lengths_of_the_last_answers() -> None:
    recent = Foresight(10.0, isl=Lengths.fixed(700.0), osl=Lengths.fixed(90.0))
    silent = replace(UNANSWERED, requests=0.0)
    assert lasting_demand(silent, recent, SETTINGS) == Demand(0.0, recent.isl, recent.osl)
    answered = lasting_demand(replace(ANSWERED, requests=0.0), recent, SETTINGS)
    assert (answered.requests_per_s, answered.isl, answered.osl) == (0.0, ANSWERED.isl, ANSWERED.osl)
