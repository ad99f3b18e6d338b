"""What a planner's connector promises, by Dynamo's interface, over everything that carries decisions out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import FleetCounts, PoolSizes, Sample, WorkerCounts
from dynaplan.contract.store_keys import fleet_key, planner_prefix
from dynaplan.graph.lifecycle import Role
from dynaplan.kubernetes.connector import KubernetesConnector
from dynaplan.kubernetes.executor import Budget
from dynaplan.kubernetes.intent import IntentMap
from dynaplan.kubernetes.labelled_workloads import LabelledWorkloads
from dynaplan.planner.component_connector import ComponentConnector
from dynaplan.planner.deployment import (
    DeploymentValidationError,
    EmptyTargetReplicasError,
    ScaledComponent,
    TargetReplica,
)
from dynaplan.planner.learnt_timings import LearntTimings
from dynaplan.planner.loop import PlannerLoop
from dynaplan.planner.model import Decision, DecisionRecord
from dynaplan.planner.virtual.connector import VirtualConnector
from dynaplan.runtime import VirtualConnectorClient
from dynaplan.store.memory import MemoryStore
from dynaplan.util.errors import DeadlineExceeded, TemporaryError, UserError
from tests.contract.runtimes import runtime_of
from tests.fakes.clock import LoopClock
from tests.fakes.kube_api import KubeApi
from tests.fakes.pod_controller import PodController
from tests.fakes.registrations import FakeRegistrations

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

DEADLINE_S = 60.0
"""In the time of the event loop, which passes in no time."""

STARTUP_S = 5.0


def counts(prefill: int, decode: int) -> FleetCounts:
    return FleetCounts(WorkerCounts(ready=prefill, gpus=1), WorkerCounts(ready=decode, gpus=1))


class Executor:
    """A system that carries decisions out in the background, ``STARTUP_S`` after each, unless it is idle."""

    def __init__(self) -> None:
        self.is_idle = False
        self.model = {Role.PREFILL: "tiny", Role.DECODE: "tiny"}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = self._task or asyncio.create_task(self._run())

    async def end(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def deployed(self) -> list[ScaledComponent]:
        return [ScaledComponent(role, role.value, (model,)) for role, model in self.model.items()]

    async def begin(self) -> None:
        raise NotImplementedError

    async def carry_out(self) -> None:
        raise NotImplementedError

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(STARTUP_S)
            if not self.is_idle:
                await self.carry_out()


class OverKeys(Executor):
    """One prefill and one decode worker over a key-value store in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore(LoopClock())
        self.fleet = counts(1, 1)
        self.connector = VirtualConnector(
            self.store, "ns", FakeRegistrations(lambda: self.fleet, self.deployed)
        )

    async def begin(self) -> None:
        pass

    def go_away(self) -> None:
        self.store.is_available = False

    async def overtake(self) -> None:
        await self.store.put(planner_prefix("ns") + "num_decode_workers", "4")


class Local(OverKeys):
    """The fleet plugin's part: it publishes the fleet, and acknowledges when every wanted worker is ready."""

    async def begin(self) -> None:
        for name in ("num_prefill_workers", "num_decode_workers", "decision_id", "scaled_decision_id"):
            await self.store.put(planner_prefix("ns") + name, "1")
        await self._publish()

    async def carry_out(self) -> None:
        desired = await self.connector.desired()
        self.fleet = counts(desired.num_prefill_workers, desired.num_decode_workers)
        await self._publish()
        await self.store.put(planner_prefix("ns") + "scaled_decision_id", str(desired.decision_id))

    async def _publish(self) -> None:
        await self.store.put(fleet_key("ns"), json.dumps(self.fleet.to_json()))


class Virtual(OverKeys):
    """A program of the user's: it has published nothing, and its workers register."""

    async def carry_out(self) -> None:
        client = VirtualConnectorClient(runtime_of(self.store))
        decision = await client.get()
        if decision.is_pending:
            self.fleet = counts(decision.num_prefill_workers, decision.num_decode_workers)
            await client.complete(decision)


class Cluster(Executor):
    """Two Deployments on a cluster; what acts is the controller's part: pods come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.api = KubeApi()
        self.pods = PodController(self.api)
        for role in self.model:
            self.pods.add_deployment(role.value, 1)
        self.connector = KubernetesConnector(
            LabelledWorkloads(self.api.client(), "ns"),
            IntentMap(self.api.client(), "ns"),
            Budget(8, {Role.PREFILL: 1, Role.DECODE: 1}),
        )

    async def begin(self) -> None:
        for role, model in self.model.items():
            self.pods.set_model(role.value, model)

    async def end(self) -> None:
        await super().end()
        await self.connector.close()

    async def carry_out(self) -> None:
        self.pods.act()

    def go_away(self) -> None:
        self.api.is_available = False

    async def overtake(self) -> None:
        self.api.change("/apis/apps/v1", "deployments", "decode", spec={"replicas": 4})


SYSTEMS: dict[str, type[Any]] = {"local": Local, "virtual": Virtual, "kubernetes": Cluster}


@pytest.fixture(params=SYSTEMS)
async def system(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    made = SYSTEMS[request.param]()
    await made.begin()
    yield made
    await made.end()


def planner_of(system: Any, model_name: str | None = None) -> ComponentConnector:
    """The planner's end; the other one begins with it, in the time of the test."""
    system.start()
    return ComponentConnector(system.connector, LoopClock(), model_name, deadline_s=DEADLINE_S)


async def numbers(system: Any) -> tuple[int, int]:
    fleet = await system.connector.fleet()
    return fleet.prefill.ready, fleet.decode.ready


async def test_numbers_are_set_together_and_waited_for(system):
    planner = planner_of(system)
    await planner.set_component_replicas([TargetReplica(Role.PREFILL, 2), TargetReplica(Role.DECODE, 3)])
    assert await numbers(system) == (2, 3)
    assert not (await system.connector.desired()).is_pending
    await planner.set_component_replicas([TargetReplica(Role.DECODE, 1)])
    assert await numbers(system) == (2, 1)


async def test_a_call_that_does_not_wait_returns_with_the_decision_made(system):
    await planner_of(system).set_component_replicas([TargetReplica(Role.DECODE, 3)], blocking=False)
    desired = await system.connector.desired()
    assert desired.is_pending
    assert (max(desired.num_prefill_workers, 1), desired.num_decode_workers) == (1, 3)
    assert await numbers(system) == (1, 1)


async def test_a_worker_more_and_a_worker_fewer(system):
    planner = planner_of(system)
    await planner.add_component(Role.PREFILL)
    assert await numbers(system) == (2, 1)
    await planner.remove_component(Role.PREFILL)
    assert await numbers(system) == (1, 1)


async def test_of_no_worker_none_is_removed(system):
    planner = planner_of(system)
    await planner.remove_component(Role.PREFILL)
    before = await system.connector.desired()
    await planner.remove_component(Role.PREFILL)
    assert await numbers(system) == (0, 1)
    assert await system.connector.desired() == before


async def test_the_numbers_that_are_there_make_no_decision(system):
    planner = planner_of(system)
    before = (await system.connector.desired()).decision_id
    await planner.set_component_replicas([TargetReplica(Role.PREFILL, 1), TargetReplica(Role.DECODE, 1)])
    assert (await system.connector.desired()).decision_id == before


async def test_no_numbers_and_numbers_below_zero_are_refused(system):
    with pytest.raises(EmptyTargetReplicasError, match="target_replicas cannot be empty"):
        await planner_of(system).set_component_replicas([])
    with pytest.raises(UserError, match="below 0"):
        await planner_of(system).set_component_replicas([TargetReplica(Role.DECODE, -1)])


async def test_waiting_for_a_decision_has_an_end(system):
    system.is_idle = True
    with pytest.raises(DeadlineExceeded, match="not carried out"):
        await planner_of(system).add_component(Role.DECODE)


async def test_somebody_who_asked_meanwhile_is_not_undone_and_the_number_is_set(system, monkeypatch):
    apply, tries = system.connector.apply, []

    async def overtaken(decision: Any) -> int:
        tries.append(decision.current.decode)
        if len(tries) == 1:
            await system.overtake()
        return await apply(decision)

    monkeypatch.setattr(system.connector, "apply", overtaken)
    await planner_of(system).add_component(Role.DECODE, blocking=False)
    assert tries == [1, 4]
    assert (await system.connector.desired()).num_decode_workers == 5


async def test_a_system_that_is_away_is_a_temporary_error(system):
    system.go_away()
    planner = planner_of(system)
    for call in (planner.add_component(Role.DECODE), planner.validate_deployment()):
        with pytest.raises(TemporaryError):
            await call
    with pytest.raises(DeadlineExceeded, match="not ready"):
        await planner.wait_for_deployment_ready()


async def test_a_deployment_is_ready_when_every_worker_is(system):
    planner = planner_of(system)
    await planner.wait_for_deployment_ready()
    await planner.set_component_replicas([TargetReplica(Role.DECODE, 3)], blocking=False)
    await planner.wait_for_deployment_ready()
    assert await numbers(system) == (1, 3)


async def test_a_deployment_of_one_model_does_not_raise(system):
    await planner_of(system).validate_deployment()
    await planner_of(system, "tiny").validate_deployment(None, None, require_prefill=False)


async def test_models_that_differ_are_not_valid(system):
    system.model = {**system.model, Role.PREFILL: "another"}
    await system.begin()
    with pytest.raises(DeploymentValidationError, match="another"):
        await planner_of(system).validate_deployment()
    with pytest.raises(DeploymentValidationError, match="mine"):
        await planner_of(system, "mine").validate_deployment(require_prefill=False)


MORE, FEWER = (
    "the mean KV usage 0.95 is above 0.9: one decode worker more",
    "the mean KV usage 0.1 is below 0.5: one decode worker fewer",
)
EXPECTED_CHANGES = [
    (PoolSizes(1, 2), MORE),
    (PoolSizes(1, 3), MORE),
    (PoolSizes(1, 2), FEWER),
    (PoolSizes(1, 1), FEWER),
]


class DecisionNotes:
    """A recorder of the decisions that change something."""

    def __init__(self) -> None:
        self.made: list[Decision] = []

    def record_sample(self, sample: Sample) -> None:
        pass

    def record_decision(self, record: DecisionRecord) -> None:
        self.made.append(record.decision)

    def close(self) -> None:
        pass

    def changes(self) -> list[tuple[PoolSizes, str]]:
        return [(each.desired, each.reason) for each in self.made if each.is_change]


class Scripted:
    """An observer whose decode workers are busy until there are three, and idle from a moment on."""

    def __init__(self, system: Any) -> None:
        self._system = system
        self.kv_usage = 0.95

    async def pull(self) -> Sample:
        prefill, decode = await numbers(self._system)
        busy = self.kv_usage if decode < 3 or self.kv_usage < 0.5 else 0.7
        now_s = LoopClock().now_s()
        return Sample(now_s, busy, prefill_queue=0.0, prefill_workers=prefill, decode_workers=decode)

    def learnt(self) -> LearntTimings:
        return LearntTimings()


async def test_the_same_load_makes_the_same_decisions_for_the_same_reasons(system):
    system.start()
    settings = PlannerSettings.from_options({"namespace": "ns", "adjustment-interval": 10, "min-endpoint": 1})
    observer, notes = Scripted(system), DecisionNotes()
    loop = PlannerLoop(settings, observer, system.connector, [notes], LoopClock())
    planning = asyncio.create_task(loop.run())
    await asyncio.sleep(120)
    observer.kv_usage = 0.1
    await asyncio.sleep(240)
    planning.cancel()
    await asyncio.gather(planning, return_exceptions=True)
    assert notes.changes() == EXPECTED_CHANGES
