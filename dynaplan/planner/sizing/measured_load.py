"""A finished interval as the queueing model sees it: its measured demand in the steady state.

Assumes that the interval was long against a request, so that its mean rate and lengths describe it. Its
rate is that of the requests that arrived, its lengths are those of the requests that were answered.
"""

from __future__ import annotations

from dynaplan.fleet.counts import Targets
from dynaplan.gateway.traffic import Traffic
from dynaplan.planner.forecasting.dispersion import dispersions_of
from dynaplan.planner.model.traffic import Demand
from dynaplan.planner.sizing.queueing.queueing_model import ServiceModel, SteadyState


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


def measured_steady_state(service: ServiceModel, traffic: Traffic, serving: Targets) -> SteadyState | None:
    """Return the queueing model's view of a finished interval: its measured demand on that service.

    None if demand or lengths are not known, or if a role had no worker (``serving``).
    """
    demand = measured_demand(traffic)
    if demand is None or not serving.decode or (service.prefill and not serving.prefill):
        return None
    return SteadyState(service, demand)
