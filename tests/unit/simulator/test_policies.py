"""The live planner's loop in virtual time."""

from __future__ import annotations

import pytest

from dynaplan.domain.planning.scaling import DesiredCounts
from dynaplan.domain.planning.targets import Targets
from dynaplan.domain.settings.planner import PlannerSettings
from dynaplan.simulator.options import SimulateOptions
from dynaplan.simulator.policies import PlannerPolicy
from dynaplan.simulator.service import SimulatedService
from dynaplan.simulator.shell.simulation import service_settings


class Waiting:
    """An awaitable that waits for an event loop."""

    def __await__(self):
        yield


def test_a_simulated_deployment_that_waits_is_an_error(
    monkeypatch,
) -> None:
    policy = PlannerPolicy("load", PlannerSettings())
    service = SimulatedService(service_settings(SimulateOptions("")), Targets(1, 1))
    policy.begin(service)
    policy.look(service)

    async def desired() -> DesiredCounts | None:
        await Waiting()
        return None

    monkeypatch.setattr(policy, "desired", desired)
    monkeypatch.setattr(policy._cycle, "_is_scaling", True)
    with pytest.raises(RuntimeError, match="does not wait"):
        policy.look(service)
