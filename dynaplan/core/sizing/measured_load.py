"""A finished interval as the queueing model sees it: its measured demand in the steady state.

Assumes that the interval was long against a request, so that its mean rate and lengths describe it. Its
rate is that of the requests that arrived, its lengths are those of the requests that were answered.
"""

from __future__ import annotations

from dataclasses import replace

from dynaplan.core.forecasting.dispersion import dispersions_of
from dynaplan.core.sizing.queueing.queueing_model import ServiceModel, SteadyState
from dynaplan.domain.planning.targets import Targets
from dynaplan.domain.planning.traffic import Demand, Foresight, Lengths, Traffic
from dynaplan.domain.settings.planner import PlannerSettings


def measured_demand(traffic: Traffic) -> Demand | None:
    """Return the demand of a finished interval; None without requests, or where lengths are not known.

    Its burstiness b is ``Traffic.dispersion``: the variance over the mean of the arrivals between two metric
    pulls within the interval. Below 1 it counts as 1 (Poisson), for a few pulls show that by chance; so does
    an unknown one (fewer than 5 pulls, or Prometheus as the source).
    """
    isl, osl = traffic.isl, traffic.osl
    if not (traffic.requests and isl and osl and isl.total and osl.total):
        return None
    burstiness = max(1.0, traffic.dispersion or 1.0)
    hits = traffic.prefix_hit_rate or 0.0
    scales = dispersions_of(traffic.arrivals, traffic.interval_s)
    return Demand(traffic.requests / traffic.interval_s, isl, osl, hits, burstiness, scales)


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


def measured_steady_state(service: ServiceModel, traffic: Traffic, serving: Targets) -> SteadyState | None:
    """Return the queueing model's view of a finished interval: its measured demand on that service.

    None if demand or lengths are not known, or if a role had no worker (``serving``).
    """
    demand = measured_demand(traffic)
    if demand is None or not serving.decode or (service.prefill and not serving.prefill):
        return None
    return SteadyState(service, demand)
