"""The planning loop on a clock that only the loop moves; fleet, queue and workers are twins in memory."""

from __future__ import annotations

import asyncio
import logging

import pytest

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import FleetCounts, Sample, WorkerCounts
from dynaplan.contract.holds import Hold, RoleHolds
from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.planner.loop import PlannerLoop
from dynaplan.planner.model import DecisionRecord, Observation
from dynaplan.planner.observer import Observer
from dynaplan.planner.ports import NothingToPlan
from dynaplan.planner.rules.load_policy import average_load
from dynaplan.store.instances import Instance
from dynaplan.util.errors import QueueUnavailable, StoreUnavailable
from tests.fakes.clock import ManualClock
from tests.fakes.connector import MemoryConnector
from tests.fakes.worker_metrics import MemoryMetrics


class Notes:
    """A recorder that keeps everything."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.records: list[DecisionRecord] = []

    def record_sample(self, sample: Sample) -> None:
        self.samples.append(sample)

    def record_decision(self, record: DecisionRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


class Depth:
    """The prefill queue and the connection to it; raises what it was told to."""

    def __init__(self) -> None:
        self.value = 0
        self.error: Exception | None = None
        self.connections = 0

    async def connect(self):
        self.connections += 1
        return self

    async def queue(self, stream: str):
        assert stream == "dynamo_prefill_queue"
        return self

    async def depth(self) -> int:
        if self.error:
            raise self.error
        return self.value


class World:
    """A deployment whose fleet follows what is desired as soon as ``is_obedient``."""

    def __init__(self, prefill: int = 1, decode: int = 1, **options: object) -> None:
        self.settings = PlannerSettings.from_options({"adjustment-interval": 10, **options})
        self.clock = ManualClock()
        self.connector = MemoryConnector(
            FleetCounts(WorkerCounts(ready=prefill), WorkerCounts(ready=decode)),
            DesiredCounts(prefill or -1, decode, 0, 0),
        )
        self.metrics, self.depth, self.notes = MemoryMetrics(), Depth(), Notes()
        self.usage: float | None = 0.7
        self.is_obedient = True
        self.observer = Observer(self.settings, self.instances, self.metrics, self.depth.connect, self.clock)
        self.loop = PlannerLoop(
            self.settings,
            self.observer,
            self.connector,
            [self.notes],
            self.clock,
            wall_time=lambda: "2026-01-01T00:00:00+00:00",
        )
        self._running: asyncio.Task[None] | None = None

    def instances(self, component: str) -> list[Instance]:
        counts = {"PrefillWorker": self.connector._fleet.prefill, "VllmWorker": self.connector._fleet.decode}
        return [
            Instance("dynamo", component, "generate", number, f"http://{component}:{number}")
            for number in range(counts[component].ready)
        ]

    async def passing(self, seconds: float) -> None:
        """Let the loop run, or go on, for that time; the world follows."""
        task = self._running = self._running or asyncio.create_task(self.loop.run())
        until_s = self.clock.now_s() + seconds
        while self.clock.now_s() < until_s and not task.done():
            if self.is_obedient:
                self.connector.settle()
            if self.usage is None:
                self.metrics.by_url.clear()
            else:
                for each in self.instances("VllmWorker"):
                    self.metrics.by_url[each.url] = WorkerLoad(kv_usage=self.usage)
            await asyncio.sleep(0)
        assert not task.done()

    async def decode_workers(self) -> int:
        return (await self.connector.desired()).num_decode_workers


async def test_the_planner_wants_to_remove_a_held_worker_and_does_not_until_it_is_released():
    world = World(decode=2)
    world.usage = 0.01
    world.connector.set_holds(RoleHolds(decode=Hold(2, 2, by="alice")))
    await world.passing(30.5)
    assert await world.decode_workers() == 2
    decision = world.notes.records[-1].decision
    assert "decode is held at 2 by alice until `dynaplan release`, instead of 1" in decision.reason
    world.connector.set_holds(RoleHolds())
    await world.passing(20)
    assert await world.decode_workers() == 1


async def test_it_pulls_every_interval_and_decides_every_adjustment_interval():
    world = World()
    await world.passing(30.5)
    assert len(world.notes.samples) >= 28
    assert len(world.notes.records) == 3
    assert not any(record.decision.is_change for record in world.notes.records)


async def test_an_interval_that_changes_nothing_says_so_in_the_words_of_dynamo_s_planner(caplog):
    with caplog.at_level(logging.INFO):
        await World(prefill=1, decode=2).passing(11)
    assert ("INFO", "No scaling needed (prefill=1, decode=2)") in [
        (record.levelname, record.getMessage()) for record in caplog.records
    ]


async def test_a_model_that_is_not_loaded_is_not_planned_for_and_that_is_said_once(caplog, monkeypatch):
    world = World(prefill=0)

    async def unloaded():
        raise NothingToPlan("the model a is unloaded")

    monkeypatch.setattr(world.connector, "fleet", unloaded)
    with caplog.at_level(logging.INFO):
        await world.passing(35)
    assert [record.decision.is_change for record in world.notes.records] == [False] * 3
    assert "the model a is unloaded" in world.notes.records[-1].decision.reason
    said = [record.levelname for record in caplog.records if "is unloaded" in record.getMessage()]
    assert said == ["INFO"]


async def test_a_worker_that_is_needed_and_not_allowed_is_said_in_place_of_no_scaling_needed(caplog):
    world = World(prefill=1, decode=2, **{"max-gpu-budget": 3})
    world.usage = 0.95
    with caplog.at_level(logging.INFO):
        await world.passing(11)
    said = [record.getMessage() for record in caplog.records]
    (withheld,) = [each for each in said if each.startswith("scaling is needed, and not possible now: ")]
    assert "4 GPUs would be over the budget of 3" in withheld
    assert not [each for each in said if "No scaling needed" in each]


async def test_nothing_is_said_of_scaling_where_the_fleet_is_not_known(caplog, monkeypatch):
    world = World()

    async def away():
        raise StoreUnavailable("the store is away")

    monkeypatch.setattr(world.connector, "fleet", away)
    with caplog.at_level(logging.INFO):
        await world.passing(11)
    assert not [record for record in caplog.records if "No scaling needed" in record.getMessage()]


async def test_load_adds_a_worker_and_the_next_interval_begins_when_it_is_ready():
    world = World()
    world.usage, world.is_obedient = 0.95, False
    await world.passing(10.5)
    assert await world.decode_workers() == 2
    pulls = len(world.notes.samples)
    await world.passing(5)
    assert len(world.notes.samples) == pulls
    world.is_obedient = True
    await world.passing(12)
    (_, second) = world.notes.records
    assert second.observation.load.pulls == 11
    assert not second.observation.load.changed


async def test_while_a_decision_is_carried_out_nothing_is_pulled_and_nothing_decided():
    world = World()
    world.is_obedient = False
    world.connector.set_desired(DesiredCounts(1, 2, 5, 4))
    world.usage = 0.95
    await world.passing(25)
    assert world.notes.samples == []
    assert len(world.notes.records) == 2
    assert "decision 5 is still being carried out" in world.notes.records[-1].decision.reason


async def test_a_store_that_is_away_while_a_decision_is_carried_out_does_not_end_the_waiting():
    world = World()
    world.is_obedient = False
    world.connector.set_desired(DesiredCounts(1, 2, 5, 4))
    await world.passing(3)
    world.connector.is_available = False
    await world.passing(3)
    assert world.notes.samples == []
    world.connector.is_available, world.is_obedient = True, True
    await world.passing(3)
    assert world.notes.samples


SLOW = FleetCounts(WorkerCounts(ready=1, startup_s=5.0), WorkerCounts(ready=1, startup_s=62.0))


@pytest.mark.parametrize(
    ("options", "lines"), [({}, 1), ({"adjustment-interval": 70}, 0)], ids=["shorter", "longer"]
)
async def test_an_interval_shorter_than_a_start_is_warned_of_once_where_decisions_wait(
    caplog, monkeypatch, options, lines
):
    world = World(**options)

    async def slow() -> FleetCounts:
        return SLOW

    monkeypatch.setattr(world.connector, "fleet", slow)
    await world.passing(150)
    told = [record.message for record in caplog.records if "takes 62 s to start" in record.message]
    assert len(told) == lines


async def test_no_operation_decides_and_asks_for_nothing():
    world = World(**{"no-operation": True})
    world.usage = 0.95
    await world.passing(21)
    assert [record.decision.desired.decode for record in world.notes.records] == [2, 2]
    assert await world.decode_workers() == 1


async def test_aggregated_never_connects_to_the_queue():
    world = World(prefill=0)
    world.usage = 0.95
    await world.passing(11)
    assert world.depth.connections == 0
    assert await world.decode_workers() == 2
    assert (await world.connector.desired()).num_prefill_workers == -1


@pytest.mark.parametrize("error", [QueueUnavailable("nats is away"), RuntimeError("what is this?")])
async def test_a_queue_that_is_away_is_a_gap_and_told_once(error, caplog):
    world = World()
    world.depth.error = error
    world.usage = 0.95
    with caplog.at_level(logging.WARNING):
        await world.passing(11)
    assert world.notes.samples[0].prefill_queue is None
    assert await world.decode_workers() == 2
    assert len(caplog.records) == 1


async def test_workers_that_do_not_answer_are_no_data():
    world = World()
    world.usage = None
    await world.passing(11)
    (record,) = world.notes.records
    assert "none of the 1 decode workers answered" in str(record.decision.steps)
    assert not record.decision.is_change


async def test_the_mean_is_over_the_workers_that_are_awake_and_the_others_are_named():
    world = World(decode=3)
    first, *others = [each.url for each in world.instances("VllmWorker")]
    asleep = WorkerLoad(is_asleep=True)
    world.metrics.by_url = {first: asleep, **dict.fromkeys(others, WorkerLoad(kv_usage=0.8))}
    sample = await world.observer.pull()
    assert (sample.kv_usage, sample.decode_workers, sample.decode_asleep) == (0.8, 2, 1)
    load = average_load([sample])
    observation = Observation(0.0, load=load)
    assert Observation.from_json(observation.to_json()) == observation
    assert "decode_asleep" not in Observation(0.0).to_json().get("load", {})
    world.metrics.by_url = dict.fromkeys((first, *others), asleep)
    sample = await world.observer.pull()
    assert (sample.kv_usage, sample.decode_workers) == (None, 0)
    assert "every decode worker that answers is asleep, 3 of 3: `dynaplan wake`" in sample.kv_missing


async def test_sleeping_prefill_workers_are_told_from_those_that_serve():
    world = World(prefill=2)
    first, second = [each.url for each in world.instances("PrefillWorker")]
    world.metrics.by_url = {first: WorkerLoad(is_asleep=True), second: None}
    sample = await world.observer.pull()
    assert (sample.prefill_workers, sample.prefill_asleep) == (1, 1)
    load = average_load([sample])
    assert Observation.from_json(Observation(0.0, load=load).to_json()).load == load
    assert "prefill_asleep" not in Observation(0.0).to_json().get("load", {})


async def test_planning_begins_when_the_only_decode_worker_sleeps():
    world = World(prefill=0)
    world.is_obedient = False
    world.connector._fleet = FleetCounts(decode=WorkerCounts(asleep=1))
    await world.passing(11)
    assert world.notes.records


async def test_the_mean_is_over_the_workers_that_answer():
    world = World(decode=3)
    world.metrics.by_url = {
        "http://VllmWorker:0": WorkerLoad(kv_usage=0.2),
        "http://VllmWorker:1": WorkerLoad(kv_usage=0.4),
    }
    sample = await world.observer.pull()
    assert sample.kv_usage == pytest.approx(0.3)
    assert sample.decode_workers == 3


async def test_a_store_that_is_away_changes_nothing_and_is_recorded():
    world = World()
    await world.passing(5)
    world.connector.is_available = False
    world.usage = 0.95
    await world.passing(11)
    assert "no data: change nothing, because the fleet is away" in world.notes.records[-1].decision.reason
    world.connector.is_available = True
    await world.passing(12)
    assert await world.decode_workers() == 2


async def test_an_exception_in_one_interval_does_not_end_the_planner(caplog, monkeypatch):
    world = World()
    world.usage = 0.95

    async def broken() -> FleetCounts:
        raise ZeroDivisionError("a bug")

    await world.passing(1)
    monkeypatch.setattr(world.connector, "fleet", broken)
    with caplog.at_level(logging.ERROR):
        await world.passing(11)
    assert [record.exc_info[0] for record in caplog.records] == [ZeroDivisionError]
    monkeypatch.undo()
    await world.passing(11)
    assert await world.decode_workers() == 2


async def test_a_decision_that_cannot_be_carried_out_is_told_in_the_next_record_and_tried_again(monkeypatch):
    world = World()
    world.usage = 0.95

    async def refused(decision: object) -> int:
        raise StoreUnavailable("etcd is away")

    monkeypatch.setattr(world.connector, "apply", refused)
    await world.passing(10.5)
    monkeypatch.undo()
    await world.passing(11)
    assert world.notes.records[-1].observation.failure == "etcd is away"
    assert world.notes.records[-1].state.decode_grace_left == 0
    assert await world.decode_workers() == 2


def waiting() -> World:
    """A world in which planning cannot begin yet."""
    world = World()
    world.is_obedient = False
    world.connector.set_fleet(FleetCounts(WorkerCounts(ready=1)))
    return world


async def test_it_waits_for_the_first_decode_worker_and_prefill_workers_alone_will_not_do():
    world = waiting()
    world.connector.set_fleet(FleetCounts(WorkerCounts(ready=1), WorkerCounts(starting=1)))
    await world.passing(5)
    assert world.notes.samples == []
    world.connector.set_fleet(FleetCounts(decode=WorkerCounts(ready=1)))
    await world.passing(5)
    assert world.notes.samples


async def test_where_no_decode_worker_was_asked_for_it_asks_for_the_least_and_waits_for_none():
    world = World(decode=0)
    await world.passing(11)
    assert await world.decode_workers() == 1


async def test_waiting_outlives_an_absence_of_the_store():
    world = waiting()
    world.connector.is_available = False
    await world.passing(5)
    world.connector.is_available = True
    world.connector.set_fleet(FleetCounts(decode=WorkerCounts(ready=1)))
    await world.passing(5)
    assert world.notes.samples


async def test_it_says_at_once_and_every_30_s_what_it_waits_for(caplog):
    world = waiting()
    with caplog.at_level(logging.INFO):
        await world.passing(65)
        world.connector.set_fleet(FleetCounts(decode=WorkerCounts(starting=2, failed=1)))
        await world.passing(30)
        world.connector.is_available = False
        await world.passing(30)
    beginning = "waiting for a decode worker to be ready: "
    assert [record.getMessage().removeprefix(beginning) for record in caplog.records] == [
        *["no VllmWorker is registered in namespace dynamo"] * 3,
        "2 starting, 0 before a restart, 1 failed",
        "the fleet is not known: the fleet is away",
    ]


async def test_grace_counts_the_intervals_after_the_worker_was_added():
    world = World()
    world.usage = 0.95
    await world.passing(10.5)
    assert await world.decode_workers() == 2
    world.usage = 0.1
    await world.passing(31)
    assert await world.decode_workers() == 2
    await world.passing(11)
    assert await world.decode_workers() == 1
