"""The SLA policy with two numbers and no profile, beside the one that knows the engines' times.

What is learnt at the beginning of an hour does not count, as in ``standing``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from tests.bench.cases import FIRST_CASE, TRACES, hour_of
from tests.bench.decisions import fared_row
from tests.bench.standing import fared
from tests.bench.table import Row

SEED = 105
CASES = (FIRST_CASE, "8B, aggregated")


def rows(_: int) -> Iterator[Row]:
    """Yield how each hour fared without the profile and with it."""
    for case, trace in product(CASES, TRACES):
        hour, name = hour_of(case, trace, SEED), f"{case}: {trace} {SEED}"
        unknown = replace(hour, planner={**hour.planner, "profile-results-dir": "learnt"})
        yield fared_row(f"{name}, no profile", fared(unknown, "sla"))
        yield fared_row(f"{name}, the true one", fared(hour, "sla"))
