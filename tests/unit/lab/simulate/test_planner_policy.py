"""The live planner's loop in virtual time."""

from __future__ import annotations

import pytest

from dynaplan.config.planner import settings_of
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.graph.lifecycle import Role
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.planner_policy import PlannerPolicy
from dynaplan.lab.simulate.policy_runs import service_settings
from dynaplan.planner.learnt_timings import LearntTimings
from dynaplan.planner.sla_model import build_sla_model
from dynaplan.planner.step_learning import simulated_learning
from dynaplan.simulation.run import simulate
from dynaplan.simulation.simulated_service import SimulatedService
from dynaplan.simulation.traces.reading import read_requests


def test_a_planner_without_a_profile_learns_the_simulated_engines() -> None:
    trace = "poisson:rate=8,duration=400,isl=1000,osl=100,isl-cv=1"
    options = SimulateOptions(trace, planner={"profile-results-dir": "learnt"})
    settings = settings_of({"policy": "sla", "adjustment-interval": 10, "profile-results-dir": "learnt"})
    model, service = build_sla_model(settings), service_settings(options)
    seen: list[LearntTimings] = []
    policy = PlannerPolicy(
        "sla",
        settings,
        model,
        on_decision=lambda _, observation, *__: seen.append(observation.learnt),
        learning=simulated_learning(model.service, is_needed=True),
    )
    simulate(read_requests(trace, 1.0, 1), service, PoolSizes(1, 1), policy)
    first, last = seen[0], seen[-1]
    assert first.lacking(is_disaggregated=True)
    assert not last.lacking(is_disaggregated=True)
    assert last.prefill
    true = service.engines[Role.PREFILL][1]
    assert last.prefill.timing().prefill_ms(1000) == pytest.approx(true.prefill_ms(1000), rel=0.1)


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
