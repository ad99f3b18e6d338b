"""The SLA policy on hours of made-up bursts, beside the best number that stands still and the oracle.

The first quarter of an hour, in which nothing is known yet, does not count (``standing.py``).
``python -m tests.bench bursts --repeats N`` takes N seeds of each family; all but the first in the first case
alone, and without the oracle (``schedules.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tests.bench.cases import CASES, FIRST_CASE, FIRST_SEED, LONG_START, SMOOTH, TRACES, hour_of
from tests.bench.schedules import run_oracle
from tests.bench.standing import Fared, best_standing, dominating, fared, judged
from tests.bench.table import Row

RULES: Mapping[str, Mapping[str, Any]] = {
    "sla": {},
    "sla, no hedge": {"hedge": False},
}
LEAST_OF_ORACLE = 0.95
LEAST_OF_ORACLE_WITH_LONG_START = 0.93
"""The aims: parts of the oracle's attainment."""

MOST_GPUS = 1.35
MOST_GPUS_FORETOLD = 1.15
"""The aims: multiples of the oracle's GPU-hours, where arrivals cannot be foretold and where they can."""


def rows(repeats: int) -> Iterator[Row]:
    """Virtual time: the same on every machine, and measured once."""
    for seed in range(FIRST_SEED, FIRST_SEED + repeats):
        for case in CASES if seed == FIRST_SEED else [FIRST_CASE]:
            for name in TRACES:
                yield from _hour(case, name, seed)


def _hour(case: str, name: str, seed: int) -> Iterator[Row]:
    """Yield the rows of one hour: each rule, and beside it what stands still and the oracle."""
    hour = hour_of(case, name, seed)
    ran = run_oracle(case, hour)
    oracle = judged(ran, ran.policy) if ran else None
    title = f"{case}: {name} {seed}"
    if oracle:
        yield from _fared(f"{title}, {oracle.policy}", oracle)
    for rule, planner in RULES.items():
        options = replace(hour, planner=planner)
        ours = fared(options, "sla")
        yield from _fared(f"{title}, {rule}", ours)
        better, best = dominating(options, ours), best_standing(options, ours.gpus)
        by = better.policy if better else "none"
        yield Row(f"{title}, {rule}: dominated by {by}", "", [float(better is not None)], 0.0)
        if best:
            yield Row(f"{title}, {rule}: {best.policy} within targets", "", [best.met])
        if oracle:
            least = LEAST_OF_ORACLE_WITH_LONG_START if case == LONG_START else LEAST_OF_ORACLE
            most = MOST_GPUS_FORETOLD if name in SMOOTH else MOST_GPUS
            met, gpus = ours.met / oracle.met, ours.gpus / oracle.gpus
            yield Row(f"{title}, {rule}: within targets over the oracle's", "x", [met], least, True)
            yield Row(f"{title}, {rule}: GPUs over the oracle's", "x", [gpus], most)


def _fared(name: str, ours: Fared) -> Iterator[Row]:
    """Yield how somebody fared, a row for each figure."""
    yield Row(f"{name}: within both targets", "", [ours.met], more_is_better=True)
    yield Row(f"{name}: mean GPUs", "", [ours.gpus])
    yield Row(f"{name}: changes of a pool's size an hour", "", [ours.changes_per_hour])
