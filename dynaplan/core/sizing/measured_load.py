"""An interval that is over, as the queueing model sees it."""

from __future__ import annotations

from dynaplan.core.sizing.queueing_model import ServiceModel, SteadyState
from dynaplan.domain.planning.targets import Targets
from dynaplan.domain.planning.traffic import Demand, Traffic


def measured_demand(traffic: Traffic) -> Demand | None:
    """The demand that was measured; None where there was none, or the lengths are not known."""
    isl, osl = traffic.isl, traffic.osl
    if not (traffic.requests and isl and osl and isl.total and osl.total):
        return None
    burstiness = max(1.0, traffic.dispersion or 1.0)
    return Demand(traffic.requests / traffic.interval_s, isl, osl, burstiness=burstiness)


def measured_steady_state(service: ServiceModel, traffic: Traffic, serving: Targets) -> SteadyState | None:
    """What to expect of it; None also where a role had no workers."""
    demand = measured_demand(traffic)
    if demand is None or not serving.decode or (service.prefill and not serving.prefill):
        return None
    return SteadyState(service, demand)
