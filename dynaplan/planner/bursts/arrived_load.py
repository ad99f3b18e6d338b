"""The demand of an interval in which perhaps nothing was answered: what is not known is as it was before."""

from __future__ import annotations

from dataclasses import replace

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.gateway.traffic import Lengths, Traffic
from dynaplan.planner.model import Demand, Foresight
from dynaplan.planner.sizing.queueing.queueing_model import measured_demand


def arrived_demand(traffic: Traffic, foresight: Foresight | None, settings: PlannerSettings) -> Demand | None:
    """Return the demand of what arrived, though nothing may have been answered; None without requests.

    In a burst on too few workers whole intervals pass without an answer. Lengths that the interval lacks are
    the recent ones, and those of the options where none were ever seen.
    """
    isl, osl = _lengths(traffic, foresight, settings)
    return measured_demand(replace(traffic, isl=isl, osl=osl))


def lasting_demand(traffic: Traffic, foresight: Foresight | None, settings: PlannerSettings) -> Demand:
    """Return the demand of an interval without requests, in which earlier ones go on: lengths likewise."""
    return Demand(0.0, *_lengths(traffic, foresight, settings), traffic.prefix_hit_rate or 0.0)


def _lengths(
    traffic: Traffic, foresight: Foresight | None, settings: PlannerSettings
) -> tuple[Lengths, Lengths]:
    recent = foresight or Foresight(traffic.interval_s)
    return (
        _first(traffic.isl, recent.isl, settings.isl_tokens),
        _first(traffic.osl, recent.osl, settings.osl_tokens),
    )


def _first(measured: Lengths | None, recent: Lengths | None, unseen_tokens: float) -> Lengths:
    return next((each for each in (measured, recent) if each and each.total), Lengths.fixed(unseen_tokens))
