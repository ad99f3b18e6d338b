"""The decision that a planner would make next, on numbers of workers that somebody asked for by hand.

An estimate: the load is that of the last recorded interval, spread over the new number of workers.
"""

from __future__ import annotations

from dataclasses import replace

from dynaplan.fleet.counts import Targets, WorkerCounts
from dynaplan.fleet.holds import RoleHolds
from dynaplan.fleet.store_keys import DesiredCounts
from dynaplan.planner.model.decisions import Decision, DecisionRecord
from dynaplan.planner.model.observation import Load, Observation
from dynaplan.planner.rules.deciding import decide
from dynaplan.planner.rules.sla_policy import SlaModel


def next_decision(
    last: DecisionRecord, workers: Targets, holds: RoleHolds, model: SlaModel | None
) -> Decision:
    """Return the decision on these numbers of workers, all of them ready, after the one in ``last``."""
    seen = last.observation
    fleet = replace(
        seen.fleet,
        prefill=_ready(seen.fleet.prefill, workers.prefill),
        decode=_ready(seen.fleet.decode, workers.decode),
    )
    observation = replace(
        seen,
        at_s=seen.at_s + last.settings.adjustment_interval_s,
        fleet=fleet,
        desired=DesiredCounts(workers.prefill, workers.decode, 0, 0),
        load=_spread(seen.load, workers),
        failure="",
        holds=holds,
    )
    return decide(last.settings, last.next_state, observation, model)[1]


def is_known(observation: Observation) -> bool:
    """Tell whether the planner knew enough in that interval to tell of the next one."""
    return not observation.unknown


def _ready(counts: WorkerCounts, workers: int) -> WorkerCounts:
    return WorkerCounts(ready=workers, gpus=counts.gpus, startup_s=counts.startup_s)


def _spread(load: Load, workers: Targets) -> Load:
    """Return the same load over these workers; the prefill queue is that of all of them already."""
    usage = load.kv_usage
    if usage is not None and workers.decode:
        usage = usage * load.decode_workers / workers.decode
    return replace(
        load,
        kv_usage=usage,
        prefill_workers=workers.prefill,
        decode_workers=workers.decode,
        changed="",
    )
