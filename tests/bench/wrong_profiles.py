"""The SLA policy with a wrong profile: engines are 30 % slower, and faster, than the profile that it knows.

``python -m tests.bench wrong-profiles --repeats N``: the first N of three seeds. Beside each simulated hour
stands the best fixed number of prefill and decode workers with as many GPUs, rounded up. Seeds 11 and 104
were looked at while the rules were written; 105 was run once, with the corrections before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from tests.bench.cases import FAMILIES, FIRST_CASE, TRACES, hour_of
from tests.bench.decisions import fared_row
from tests.bench.standing import best_standing, dominating, engines_at, fared
from tests.bench.table import Row

SEEDS = (11, 104, 105)
SPEEDS = (0.7, 1.3)
"""Speeds of the engines; the profile's is 1."""

CASES_AND_TRACES = (*product([FIRST_CASE], TRACES), *product(["8B, aggregated"], FAMILIES))
"""All traces with disaggregated workers, and those of ``FAMILIES`` with aggregated ones too."""


def rows(repeats: int) -> Iterator[Row]:
    """Yield how each hour fared, and what dominates it."""
    for seed, speed, (case, trace) in product(SEEDS[:repeats], SPEEDS, CASES_AND_TRACES):
        hour, name = hour_of(case, trace, seed), f"{case}: {trace} {seed}, {speed:g} of the speed"
        with engines_at(speed):
            ours = fared(hour, "sla")
            yield fared_row(name, ours)
            if best := best_standing(hour, math.ceil(ours.gpus)):
                yield fared_row(name, best)
            if better := dominating(hour, ours):
                yield Row(f"{name}: dominated by {better.policy}", "", [1.0], 0.0, note=str(better))
