"""The SLA policy on an hour of made-up bursts, with learnt floor, hedge or neither, beside static numbers.

Engines at a quarter of the H200's speed and targets four times as long, so that an hour takes seconds. The
first quarter of an hour, in which nothing is known yet, does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from dynaplan.simulator.options import EVERY_PROMPT_REMOTE, SimulateOptions
from dynaplan.simulator.outcome import Slo
from dynaplan.simulator.run import Result
from dynaplan.simulator.shell.simulation import run_simulations
from tests.bench.table import Row

KNOWN_FROM_S = 900.0
SLOW = {"speedup-ratio": 0.25}
HOUR = SimulateOptions(
    "",
    slo=Slo(2000.0, 80.0),
    engine=SLOW,
    prefill_engine=SLOW,
    disaggregation=replace(EVERY_PROMPT_REMOTE, prefill_deadline_ms=2000.0),
)
FAMILIES = {
    "bursts": "bursts:high=10,on=60,off=120,duration=3600",
    "levels": "levels:low=0.5,high=12,stay=60,duration=3600",
    "batches": "batches:every=40,size=60,duration=3600",
    "sessions": "sessions:people=16,on=120,off=360,duration=3600",
    "crowds": "crowds:low=1,high=8,every=300,duration=3600",
}
STATICS = ("2,1", "3,1", "2,2", "3,2", "4,2")
RULES = {"sla": {}, "sla, learnt floor": {"learnt-floor": True}, "sla, hedge": {"hedge": True}}


def rows(repeats: int) -> Iterator[Row]:
    """Virtual time: the same on every machine, and measured once. Half a minute of CPU for each family."""
    for family, trace in FAMILIES.items():
        for name, planner in RULES.items():
            options = replace(HOUR, trace=trace, policies=("sla",), planner=planner)
            yield from _rows(f"{family}, {name}", options)
        for split in STATICS:
            yield from _rows(f"{family}, {split}", replace(HOUR, trace=trace, policies=(f"static:{split}",)))


def _rows(name: str, options: SimulateOptions) -> Iterator[Row]:
    [result] = run_simulations(options)
    windows = result.outcome.windows
    late = [each for index, each in enumerate(windows) if index * windows.width_s >= KNOWN_FROM_S]
    met = sum(each.both_met for each in late) / sum(each.requests for each in late)
    yield Row(f"{name}: within both targets", "", [met], more_is_better=True)
    yield Row(f"{name}: mean GPUs", "", [_mean_gpus(result)])
    yield Row(f"{name}: changes of a pool's size", "", [result.scale_events])


def _mean_gpus(result: Result) -> float:
    moments = [(each.at_s, each.gpus) for each in result.fleet] + [(result.trace_s, 0.0)]
    gpu_s = sum(
        gpus * max(0.0, min(end_s, result.trace_s) - max(at_s, KNOWN_FROM_S))
        for (at_s, gpus), (end_s, _) in pairwise(moments)
    )
    return gpu_s / (result.trace_s - KNOWN_FROM_S)
