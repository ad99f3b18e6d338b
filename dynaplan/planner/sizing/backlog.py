"""Prompts that wait already: a backlog is demand too, on top of the forecast.

The queueing model describes a steady state; a queue that a surge left behind is not in it. So what will
wait for prefill when a worker that is asked for now could serve is added to the largest demand. With L the
start-up time and T the adjustment interval (seconds), r the soonest demand (requests/s; the measured
one where that is more than chance makes of it, ``planner/forecasting/chance.py``) and u the rate that one
prefill worker computes (requests/s):

    computed = u (ready + (starting + restarting) / 2)      starting workers are ready half of that time
    backlog  = waiting now + (r - computed) L               requests, when a new worker could serve
    demand   = largest demand + backlog / (L + T)           requests/s, where backlog > 0

The backlog is to be worked off in L + T seconds, by when workers of the next decision could serve. *Waiting
now* is the depth of the prefill queue at the last metric pull less the prompts that workers hold (prefill
workers x ``max-concurrent-prefills``), at least 0, and 0 where it is not known. u is r over the utilisation
of one worker at its largest batch (``prefill_model.py``).

Wrong for aggregated services, which have no shared queue (none is added), and where lengths of waiting
prompts differ from those of the forecast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dynaplan.planner.forecasting.chance import is_news
from dynaplan.planner.model.observation import Observation
from dynaplan.planner.model.traffic import Demand
from dynaplan.planner.sizing.look_ahead import lookahead
from dynaplan.planner.sizing.queueing.queueing_model import ServiceModel, SteadyState


def with_backlog(
    service: ServiceModel,
    demands: Sequence[Demand],
    now: Demand | None,
    observation: Observation,
    interval_s: float,
) -> Demand | None:
    """Return the largest demand with the backlog added, or None where nothing will wait.

    ``demands`` are the forecast ones, the soonest first; ``now`` is the demand of the interval that is
    over.
    """
    soonest = demands[0]
    if now and is_news(now.requests_per_s * interval_s, soonest.requests_per_s * interval_s):
        soonest = now
    state = SteadyState(service, soonest)
    if state.is_aggregated or not soonest.requests_per_s:
        return None
    per_worker = soonest.requests_per_s / state.prefill_waiting(1).utilisation
    counts = observation.fleet.prefill
    computed_per_s = per_worker * (counts.ready + counts.unmanaged + (counts.starting + counts.backoff) / 2)
    ahead_s = lookahead(observation.startup_s, interval_s)
    backlog = _waiting(service, observation)
    backlog += (soonest.requests_per_s - computed_per_s) * ahead_s.from_s
    if backlog <= 0:
        return None
    largest = max(demands, key=lambda demand: demand.requests_per_s)
    return replace(largest, requests_per_s=largest.requests_per_s + backlog / ahead_s.until_s)


def _waiting(service: ServiceModel, observation: Observation) -> float:
    """Return the prompts in the queue that no prefill worker holds."""
    load = observation.load
    if service.prefill is None or load.prefill_queue_last is None:
        return 0.0
    held = load.prefill_workers * service.prefill.concurrent_prefills
    return max(0.0, load.prefill_queue_last - held)
