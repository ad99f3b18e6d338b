"""The work of a decision, counted in steps of the models: its time would be that of the machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dynaplan.planner.bursts import interval, standing
from dynaplan.planner.model import PlannerState
from dynaplan.planner.rules.decision import decide
from dynaplan.planner.sizing.queueing import queueing_model
from tests.unit.planner.bursts.test_hedging import ON, counting, seen
from tests.unit.planner.rules import targets
from tests.unit.planner.rules.targets import planned_interval

PULLS = 10
FLUID = ("queued", "queued_by_deadline", "decoded")
EXPERTS = 2 * 28


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each step of the fluid was taken, and each pool of the queueing model computed."""
    counts: Counter[str] = Counter()

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            counts[name] += 1
            return real(*given, **named)

        return call

    for module, names in ((interval, FLUID), (standing, ("queued", "decoded"))):
        for name in names:
            monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    for name in ("PrefillWaiting", "DecodeBatch"):
        monkeypatch.setattr(queueing_model, name, counted(name, getattr(queueing_model, name)))
    return counts


def test_a_decision_takes_one_fluid_of_each_expert_and_few_pools_of_the_queueing_model(
    done: Counter[str],
) -> None:
    """It took 58 ms at an interval of 10 s once, because nobody counted."""
    state = PlannerState()
    for number in range(24):
        burst = number % 6 < 2
        traffic = counting(100.0, 50.0, (60.0,) * PULLS) if burst else seen((1.0,) * PULLS)
        observation = replace(planned_interval(2, 1, [60.0 if burst else 1.0] * 3), traffic=traffic)
        done.clear()
        state, _ = decide(ON, state, observation, targets.model())
        fluids = EXPERTS + 1 + 8
        assert done["decoded"] <= fluids * PULLS
        assert done["queued"] <= fluids * PULLS
        assert done["queued_by_deadline"] <= done["queued"]
        assert done["PrefillWaiting"] + done["DecodeBatch"] <= 64
