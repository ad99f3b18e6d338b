"""The SLA policy on hours of made-up bursts, beside splits that stand still.

These are best-static, the cheapest that keeps the promise over the whole hour, and of each rule the split
that met most with no more GPUs than it took. The first quarter of an hour, in which nothing is known yet,
does not count (``standing.py``). ``python -m tests.bench bursts --repeats N`` takes N seeds of each family;
all but the first in the first case alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dynaplan.lab.simulate.simulation import best_static
from tests.bench.cases import CASES, FIRST_CASE, FIRST_SEED, TRACES, hour_of
from tests.bench.standing import Fared, best_standing, dominating, fared, judged
from tests.bench.table import Row

RULES: Mapping[str, Mapping[str, Any]] = {
    "sla": {},
    "sla, no hedge": {"hedge": False},
}


def rows(repeats: int) -> Iterator[Row]:
    """Virtual time: the same on every machine, and measured once."""
    for seed in range(FIRST_SEED, FIRST_SEED + repeats):
        for case in CASES if seed == FIRST_SEED else [FIRST_CASE]:
            for name in TRACES:
                yield from _hour(case, name, seed)


def _hour(case: str, name: str, seed: int) -> Iterator[Row]:
    """Yield the rows of one hour: each rule, and beside it what stands still."""
    hour = hour_of(case, name, seed)
    title = f"{case}: {name} {seed}"
    static = best_static(hour).best
    yardstick = judged(static.result, f"best-static:{static}")
    yield from _fared(f"{title}, {yardstick.policy}", yardstick)
    for rule, planner in RULES.items():
        options = replace(hour, planner=planner)
        ours = fared(options, "sla")
        yield from _fared(f"{title}, {rule}", ours)
        better, best = dominating(options, ours), best_standing(options, ours.gpus)
        by = better.policy if better else "none"
        yield Row(f"{title}, {rule}: dominated by {by}", "", [float(better is not None)], 0.0)
        if best:
            yield Row(f"{title}, {rule}: {best.policy} within targets", "", [best.met])
        met, gpus = ours.met / yardstick.met, ours.gpus / yardstick.gpus
        yield Row(f"{title}, {rule}: within targets over best-static's", "x", [met], more_is_better=True)
        yield Row(f"{title}, {rule}: GPUs over best-static's", "x", [gpus])


def _fared(name: str, ours: Fared) -> Iterator[Row]:
    """Yield how somebody fared, a row for each figure."""
    yield Row(f"{name}: within both targets", "", [ours.met], more_is_better=True)
    yield Row(f"{name}: mean GPUs", "", [ours.gpus])
    yield Row(f"{name}: changes of a pool's size an hour", "", [ours.changes_per_hour])
