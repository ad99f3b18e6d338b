"""The SLA policy on hours of made-up bursts, beside the best number that stands still and the rivals.

Engines at a quarter of the H200's speed and targets four times as long, so that an hour takes seconds. The
first quarter of an hour, in which nothing is known yet, does not count (``standing.py``).
``python -m tests.bench bursts --repeats N`` takes N seeds of each family.
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
FAMILIES = {
    "bursts": "bursts:high=10,on=60,off=120,duration=3600",
    "levels": "levels:low=0.5,high=12,stay=60,duration=3600",
    "batches": "batches:every=40,size=60,duration=3600",
    "sessions": "sessions:people=16,on=120,off=360,duration=3600",
    "crowds": "crowds:low=1,high=8,every=300,duration=3600",
}
FIRST_SEED = 11
"""Seeds up to 10 were looked at while the policy was written."""

RULES: Mapping[str, Mapping[str, Any]] = {"sla": {}, "sla, hedge": {"hedge": True}}
RIVALS = ("formula", "hpa", "kpa", "load")


def rows(repeats: int) -> Iterator[Row]:
    """Virtual time: the same on every machine. A minute of CPU for each family and seed."""
    for seed in range(FIRST_SEED, FIRST_SEED + repeats):
        for family, trace in FAMILIES.items():
            hour = replace(HOUR, trace=f"{trace},seed={seed}")
            for name, planner in RULES.items():
                options = replace(hour, planner=planner)
                ours = fared(options, "sla")
                yield from _rows(f"{family} {seed}, {name}", ours)
                better, best = dominating(options, ours), best_standing(options, ours.gpus)
                by = better.policy if better else "none"
                yield Row(f"{family} {seed}, {name}: dominated by {by}", "", [float(better is not None)], 0.0)
                if best:
                    yield Row(f"{family} {seed}, {name}: {best.policy} within targets", "", [best.met])
            for rival in RIVALS:
                yield from _rows(f"{family} {seed}, {rival}", fared(hour, rival))


def _rows(name: str, ours: Fared) -> Iterator[Row]:
    yield Row(f"{name}: within both targets", "", [ours.met], more_is_better=True)
    yield Row(f"{name}: mean GPUs", "", [ours.gpus])
    yield Row(f"{name}: changes of a pool's size an hour", "", [ours.changes_per_hour])
