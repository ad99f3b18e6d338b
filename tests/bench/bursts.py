"""The SLA policy on hours of made-up bursts, beside the best number that stands still and the rivals.

Engines at a quarter of their speed and targets four times as long, so that an hour takes seconds. The first
quarter of an hour, in which nothing is known yet, does not count (``standing.py``).
``python -m tests.bench bursts --repeats N`` takes N seeds of each family; all but the first in the first
case alone, and without the rivals. A minute and a half of CPU for each seed and case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dynaplan.simulator.options import EVERY_PROMPT_REMOTE, SimulateOptions
from dynaplan.simulator.outcome import Slo
from tests.bench.standing import Fared, best_standing, dominating, fared
from tests.bench.table import Row

SLOW = {"speedup-ratio": 0.25}
HOUR = SimulateOptions(
    "",
    slo=Slo(2000.0, 80.0),
    engine=SLOW,
    prefill_engine=SLOW,
    disaggregation=replace(EVERY_PROMPT_REMOTE, prefill_deadline_ms=2000.0),
)
LARGE = {**SLOW, "profile": "h100_sxm-Llama-3.3-70B-Instruct-FP8-tp2", "tensor-parallel-size": 2}
CASES: Mapping[str, SimulateOptions] = {
    "8B": HOUR,
    "8B, start-up 240 s": replace(HOUR, startup_time_s=240.0),
    "8B, aggregated": replace(HOUR, is_disaggregated=False),
    "70B": replace(
        HOUR,
        gpus=16,
        rate_scale=0.25,
        slo=Slo(8000.0, 160.0),
        engine=LARGE,
        prefill_engine=LARGE,
        disaggregation=replace(EVERY_PROMPT_REMOTE, prefill_deadline_ms=8000.0),
    ),
}
FAMILIES = {
    "bursts": "bursts:high=10,on=60,off=120,duration=3600",
    "levels": "levels:low=0.5,high=12,stay=60,duration=3600",
    "batches": "batches:every=40,size=60,duration=3600",
    "sessions": "sessions:people=16,on=120,off=360,duration=3600",
    "crowds": "crowds:low=1,high=8,every=300,duration=3600",
}
SMOOTH = {
    "steady": "poisson:rate=6,duration=3600",
    "wave": "sinusoid:low=2,high=10,period=1200,duration=3600",
}
FIRST_SEED = 11
"""Seeds up to 10 were looked at while the policy was written."""

RULES: Mapping[str, Mapping[str, Any]] = {
    "sla": {},
    "sla, hedge": {"hedge": True},
    "sla, adaptive": {"adaptive-interval": True},
}
RIVALS = ("formula", "hpa", "kpa", "load")


def rows(repeats: int) -> Iterator[Row]:
    """Virtual time: the same on every machine. A quarter of an hour of CPU for the first seed's cases."""
    for seed in range(FIRST_SEED, FIRST_SEED + repeats):
        for case in CASES if seed == FIRST_SEED else [next(iter(CASES))]:
            for name, trace in {**FAMILIES, **SMOOTH}.items():
                yield from cell(case, name, trace, seed)


def cell(case: str, name: str, trace: str, seed: int) -> Iterator[Row]:
    """Yield the rows of one trace: each rule, what stands still, and for the first seed the rivals."""
    hour = replace(CASES[case], trace=f"{trace},seed={seed}")
    title = f"{case}: {name} {seed}"
    for rule, planner in RULES.items():
        options = replace(hour, planner=planner)
        ours = fared(options, "sla")
        yield from _rows(f"{title}, {rule}", ours)
        better, best = dominating(options, ours), best_standing(options, ours.gpus)
        by = better.policy if better else "none"
        yield Row(f"{title}, {rule}: dominated by {by}", "", [float(better is not None)], 0.0)
        if best:
            yield Row(f"{title}, {rule}: {best.policy} within targets", "", [best.met])
    for rival in RIVALS if seed == FIRST_SEED and case == next(iter(CASES)) else ():
        yield from _rows(f"{title}, {rival}", fared(hour, rival))


def _rows(name: str, ours: Fared) -> Iterator[Row]:
    yield Row(f"{name}: within both targets", "", [ours.met], more_is_better=True)
    yield Row(f"{name}: mean GPUs", "", [ours.gpus])
    yield Row(f"{name}: changes of a pool's size an hour", "", [ours.changes_per_hour])
