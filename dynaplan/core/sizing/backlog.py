"""Who waits already: a backlog is demand too, on top of what is foretold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dynaplan.core.sizing.look_ahead import lookahead
from dynaplan.core.sizing.queueing_model import ServiceModel, SteadyState
from dynaplan.domain.planning.observation import Observation
from dynaplan.domain.planning.traffic import Demand


def with_backlog(
    service: ServiceModel,
    demands: Sequence[Demand],
    now: Demand | None,
    observation: Observation,
    interval_s: float,
) -> Demand | None:
    """The largest demand, and with it what will wait for prefill when workers that are asked for now serve.

    ``demands`` are those that are foretold, the soonest first. Nobody can help sooner: until then the queue
    grows by what comes, no less than ``now``, and shrinks by what the workers that are there, or are
    starting, compute. The rest is to be worked off in as long a time as it took to come: until the workers of
    the next decision would serve.
    None where nobody will wait.
    """
    soonest = max(demands[0], now or demands[0], key=lambda each: each.requests_per_s)
    state = SteadyState(service, soonest)
    if state.is_aggregated or not soonest.requests_per_s:
        return None
    per_worker = soonest.requests_per_s / state.prefill_waiting(1).utilisation
    counts = observation.fleet.prefill
    # Those that are starting become ready at some time until then: on average half way.
    computed_per_s = per_worker * (counts.ready + (counts.starting + counts.backoff) / 2)
    ahead_s = lookahead(observation.startup_s, interval_s)
    waiting = _waiting(service, observation)
    waiting += (soonest.requests_per_s - computed_per_s) * ahead_s.from_s
    if waiting <= 0:
        return None
    most = max(demands, key=lambda each: each.requests_per_s)
    return replace(most, requests_per_s=most.requests_per_s + waiting / ahead_s.until_s)


def _waiting(service: ServiceModel, observation: Observation) -> float:
    """The prompts in the queue that no worker has taken."""
    load = observation.load
    if service.prefill is None or load.prefill_queue_last is None:
        return 0.0
    taken = load.prefill_workers * service.prefill.concurrent_prefills
    return max(0.0, load.prefill_queue_last - taken)
