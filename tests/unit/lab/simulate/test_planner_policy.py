"""The live planner's loop in virtual time."""

from __future__ import annotations

import pytest

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.planner_policy import PlannerPolicy
from dynaplan.lab.simulate.policy_runs import service_settings
from dynaplan.simulation.simulated_service import SimulatedService


class Waiting:
    """An awaitable that waits for an event loop."""

    def __await__(self):
        yield


def test_a_simulated_deployment_that_waits_is_an_error(
    monkeypatch,
) -> None:
    policy = PlannerPolicy("load", PlannerSettings())
    service = SimulatedService(service_settings(SimulateOptions("")), PoolSizes(1, 1))
    policy.begin(service)
    policy.evaluate(service)

    async def desired() -> DesiredCounts | None:
        await Waiting()
        return None

    monkeypatch.setattr(policy, "desired", desired)
    monkeypatch.setattr(policy._cycle, "_is_scaling", True)
    with pytest.raises(RuntimeError, match="does not wait"):
        policy.evaluate(service)
