"""Aggregated workers that stand still: what each number of them misses by the sizing's fluid, and simulated.

Of each hour the least number with which both targets hold, and the parts of the requests that miss one.
``python -m tests.bench fluid --repeats N`` takes N seeds of each family, some ten seconds an hour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.gateway.traffic import Lengths
from dynaplan.graph.lifecycle import Role
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.simulation import run_simulations, service_settings
from dynaplan.planner.bursts.memory import Standing
from dynaplan.planner.bursts.standing import tried
from dynaplan.planner.model import Demand, WorkerLimits
from dynaplan.planner.sizing.queueing.queueing_model import ServiceModel
from dynaplan.planner.sizing.queueing.workload import WorkerKind
from dynaplan.simulation.traces.reading import read_requests
from tests.bench.cases import FIRST_SEED, TRACES, hour_of
from tests.bench.table import Row

INTERVAL_S = 30
MOST = 8
"""Workers that are tried at most."""

UNFADED_S = 1e9
"""A window in which nothing fades: all of the hour counts."""

Missed = Sequence[tuple[float, float]]
"""For 1, 2, ... workers the parts of the requests over the TTFT, and over the ITL."""


def rows(repeats: int) -> Iterator[Row]:
    """Virtual time: the same on every machine, and measured once."""
    for seed in range(FIRST_SEED, FIRST_SEED + repeats):
        for name in TRACES:
            hour = hour_of("8B, aggregated", name, seed)
            simulated, said = missed_by_simulation(hour), missed_by_fluid(hour)
            note = f"{least(said)} by the fluid, {least(simulated)} simulated"
            apart = float(least(said) - least(simulated))
            yield Row(f"{name} {seed}: least workers, fluid less simulated", "", [apart], 0.0, note=note)
            for index, target in enumerate(("TTFT", "ITL")):
                differences = [
                    mine[index] - theirs[index] for mine, theirs in zip(said, simulated, strict=True)
                ]
                yield Row(f"{name} {seed}: part over the {target}, fluid less simulated", "", differences)


def least(missed: Missed) -> int:
    """Return the least number of workers with which both targets hold; one more than tried if none does."""
    enough = (number for number, parts in enumerate(missed, 1) if max(parts) <= 0.05)
    return next(enough, MOST + 1)


def missed_by_simulation(hour: SimulateOptions) -> Missed:
    """Return what each number of workers misses when it is simulated."""
    policies = tuple(f"static:{number}" for number in range(1, MOST + 1))
    outcomes = [result.outcome for result in run_simulations(replace(hour, policies=policies))]
    return [(1 - each.attainment(each.ttft_met), 1 - each.attainment(each.itl_met)) for each in outcomes]


def missed_by_fluid(hour: SimulateOptions) -> Missed:
    """Return what each number of workers misses by the fluid, from the arrivals of each second.

    Answers that have not ended with the last request end in the interval after it.
    """
    engine, timing = service_settings(hour).engines[Role.DECODE]
    service = ServiceModel(WorkerKind(timing, engine), is_evenly_routed=True)
    targets, after, demand = SlaTargets(hour.slo.ttft_ms, hour.slo.itl_ms), Standing(), None
    trace = read_requests(hour.trace, hour.rate_scale, hour.seed)
    groups = groupby(trace, lambda request: int(request.arrival_s) // INTERVAL_S)
    came = {number: list(requests) for number, requests in groups}
    for number in range(max(came) + 2):
        arrivals, requests = [0.0] * INTERVAL_S, came.get(number, [])
        for request in requests:
            arrivals[int(request.arrival_s) - number * INTERVAL_S] += 1
        if requests:
            demand = Demand(
                len(requests) / INTERVAL_S,
                Lengths.of([each.prompt_tokens for each in requests]),
                Lengths.of([each.output_tokens for each in requests]),
            )
        if demand:
            limits = WorkerLimits(max_gpus=MOST)
            after = tried(after, arrivals, service, demand, targets, UNFADED_S, float(INTERVAL_S), limits)
    pairs = zip(after.prefill, after.decode, strict=True)
    return [(late.late / after.requests, long.late / after.requests) for late, long in pairs]
