"""The original's decisions, rule by rule: reference 5.4. Thresholds .9/.5 and, with one prefill worker, 5/.2.

With more prefill workers the queue is multiplied, as the thresholds are per worker here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.core.planning.deciding import decide
from dynaplan.domain.planning.decisions import PlannerState
from dynaplan.domain.planning.targets import Targets
from tests.unit.core.planning.situations import SEEDS, interval, outcome

VECTORS = {
    "1 a long steady queue adds a prefill worker": (SEEDS, (1, 1), 0.7, (6, 6, 6), (2, 1)),
    "2 a queue that shrinks fast enough adds none": (SEEDS, (1, 1), 0.7, (9, 7, 5), (1, 1)),
    "3 a queue at the upper threshold is not above it": (SEEDS, (1, 1), 0.7, (5, 5), (1, 1)),
    "4 a queue at the lower threshold is not below it": (SEEDS, (2, 1), 0.7, (0.4,), (2, 1)),
    "5 KV usage at the upper threshold is not above it": (SEEDS, (1, 1), 0.9, (1,), (1, 1)),
    "6 KV usage above the upper threshold adds a decode worker": (SEEDS, (1, 1), 0.91, (1,), (1, 2)),
    "7 KV usage at the lower threshold is not below it": (SEEDS, (1, 2), 0.5, (1,), (1, 2)),
    "8 KV usage below the lower threshold removes a decode worker": (SEEDS, (1, 2), 0.49, (1,), (1, 1)),
    "9 prefill gets the last GPU of the budget": (
        replace(SEEDS, max_gpu_budget=3),
        (1, 1),
        0.95,
        (9, 9),
        (2, 1),
    ),
    "10 one of each kind in one interval": (replace(SEEDS, max_gpu_budget=4), (1, 1), 0.95, (9, 9), (2, 2)),
    "11 a prefill worker makes room for a decode worker": (
        replace(SEEDS, max_gpu_budget=3),
        (2, 1),
        0.95,
        (0, 0),
        (1, 2),
    ),
    "12 a decode worker makes room for a prefill worker": (
        replace(SEEDS, max_gpu_budget=3),
        (1, 2),
        0.1,
        (9, 9),
        (2, 1),
    ),
    "15 nothing goes below the minimum of each kind": (
        replace(SEEDS, min_endpoint=2),
        (2, 2),
        0.1,
        (0,),
        (2, 2),
    ),
    "16 aggregated: no prefill stages, no queue needed": (SEEDS, (0, 1), 0.3, (), (0, 1)),
}


@pytest.mark.parametrize(("settings", "current", "kv", "queue", "desired"), VECTORS.values(), ids=VECTORS)
def test_golden_vector(settings, current, kv, queue, desired):
    assert outcome(settings, interval(*current, kv, queue)) == Targets(*desired)


def played(usages: list[float]) -> list[int]:
    """The decode workers after each interval; the fleet follows every decision."""
    state, decode, seen = PlannerState(), 1, []
    for usage in usages:
        state, decision = decide(SEEDS, state, interval(1, decode, usage, (1,)))
        decode = decision.desired.decode
        seen.append(decode)
    return seen


def test_13_no_decode_worker_is_removed_in_the_three_intervals_after_one_was_added():
    assert played([0.95, 0.1, 0.1, 0.1, 0.1]) == [2, 2, 2, 2, 1]


def test_14_every_added_decode_worker_starts_the_grace_anew():
    assert played([0.95, 0.95, 0.1, 0.1, 0.1, 0.1]) == [2, 3, 3, 3, 3, 2]
