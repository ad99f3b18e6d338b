from __future__ import annotations

import math

from dynaplan.core.sizing.queueing.prefill_model import PrefillWaiting
from dynaplan.core.sizing.queueing.workload import prompts_of
from tests.unit.core.sizing.queueing.test_decode_model import DEMAND, KIND


def pool(requests_per_s: float) -> PrefillWaiting:
    return PrefillWaiting(prompts_of(DEMAND, KIND), KIND, 1, requests_per_s / 1000, 1.0)


def test_an_overloaded_pool_never_answers() -> None:
    overloaded = pool(1000.0)
    assert overloaded.is_overloaded
    assert overloaded.mean_ms == math.inf
    assert overloaded.chance_over(1e9) == 1.0


def test_a_pool_without_requests_takes_the_time_of_one_prompt() -> None:
    idle = pool(0.0)
    assert not idle.is_overloaded
    assert idle.mean_ms == 5.0 + 0.1 * 400
