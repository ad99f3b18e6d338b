"""The live planner with traffic: watched at every pull, foretold at every interval."""

from __future__ import annotations

from dataclasses import replace

import aiohttp

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import Sample
from dynaplan.contract.traffic import Traffic
from dynaplan.planner.assembly import LoopPulse
from dynaplan.planner.forecasting.library_forecaster import make_forecaster
from dynaplan.planner.loop import PlannerLoop
from dynaplan.planner.metrics_server import serve_metrics
from dynaplan.planner.observer import TrafficObserver
from dynaplan.planner.recorders.gauges import GaugesRecorder
from tests.fakes.clock import ManualClock
from tests.unit.planner.rules.targets import H200, model, traffic
from tests.unit.planner.test_loop import World


class Source:
    """Traffic as the test says; counts what it is asked. Like the real ones it never raises."""

    def __init__(self, clock: ManualClock) -> None:
        self.rate: float | None = 1.0
        self.pulls = 0
        self.missing = ""
        self.intervals: list[float] = []

    async def pull(self) -> None:
        self.pulls += 1

    async def traffic(self, interval_s: float) -> Traffic:
        self.intervals.append(interval_s)
        if self.missing:
            return Traffic(interval_s, missing=self.missing)
        return traffic(self.rate, interval_s=interval_s)

    async def close(self) -> None:
        pass


class TargetsWorld(World):
    """A deployment whose planner plans for targets."""

    def __init__(self, **options: object) -> None:
        options = {"policy": "sla", "profile-results-dir": H200, "itl": 20, **options}
        super().__init__(1, 1, **options)
        self.source = Source(self.clock)
        forecaster = make_forecaster(self.settings, self.settings.adjustment_interval_s)
        self.watch = TrafficObserver(self.settings, self.source, forecaster, self.clock)
        self.loop = PlannerLoop(
            self.settings,
            self.observer,
            self.connector,
            [self.notes],
            self.clock,
            model=model(self.settings),
            traffic=self.watch,
            wall_time=lambda: "2026-01-01T00:00:00+00:00",
        )


async def test_it_looks_at_every_pull_and_plans_in_even_intervals():
    world = TargetsWorld()
    await world.passing(35)
    assert world.source.pulls >= 30
    assert world.source.intervals == [10.0] * len(world.notes.records)
    assert len(world.notes.records) == 3


async def test_traffic_that_is_not_known_is_logged_every_30_s_until_it_is(caplog):
    world = TargetsWorld()
    world.source.missing = "served-model-name is 'misspelt', and the frontends have served 'mine' only"
    with caplog.at_level("INFO"):
        await world.passing(75)
    assert not [each for each in caplog.records if "No scaling needed" in each.message]
    said = [each.message for each in caplog.records if "traffic is not known" in each.message]
    assert said == [f"the traffic is not known: {world.source.missing}"] * 3
    world.source.missing = ""
    with caplog.at_level("INFO"):
        await world.passing(15)
    assert "the traffic is known again" in [each.message for each in caplog.records]


async def test_traffic_that_needs_them_gets_workers_although_nothing_was_acknowledged():
    world = TargetsWorld()
    world.is_obedient, world.source.rate = False, 20.0
    await world.passing(15)
    first = (await world.connector.desired()).num_prefill_workers
    world.source.rate = 60.0
    await world.passing(35)
    assert (await world.connector.desired()).num_prefill_workers > first > 1


async def test_frontends_that_are_away_change_nothing():
    world = TargetsWorld()
    world.source.rate = 40.0
    await world.passing(15)
    there = await world.connector.desired()
    world.source.rate = None
    await world.passing(15)
    assert (await world.connector.desired()).num_prefill_workers == there.num_prefill_workers
    assert world.notes.records[-1].observation.traffic.missing == "no frontend answered"


async def test_how_long_workers_take_to_start_is_what_the_fleet_says_unless_the_user_does():
    world = TargetsWorld()
    fleet = world.connector._fleet
    world.connector._fleet = replace(fleet, decode=replace(fleet.decode, startup_s=42.0))
    await world.passing(15)
    assert world.notes.records[-1].observation.startup_s == 42.0
    assert world.notes.records[-1].observation.foresight.expected[-1].ahead == 6
    told = TargetsWorld(**{"startup-time": 5})
    await told.passing(15)
    assert told.notes.records[-1].observation.startup_s == 5.0


def test_gpu_seconds_count_by_the_clock_and_only_while_workers_are_there():
    gauges = GaugesRecorder(PlannerSettings(prefill_engine_num_gpu=2))
    for at_s, prefill in ((0.0, 1), (3600.0, 0), (7200.0, 0)):
        gauges.record_sample(Sample(at_s, prefill_workers=prefill, decode_workers=1))
    assert gauges.read()["dynamo_planner_gpu_seconds_total"] == 3600 * (3.0 + 1.0)
    assert gauges.read()["dynamo_planner_num_decode_replicas"] == 1


async def test_a_planner_of_its_own_serves_its_numbers(unused_tcp_port):
    settings = PlannerSettings(namespace="ns", metric_reporting_prometheus_port=unused_tcp_port)
    clock = ManualClock()
    pulse = LoopPulse(clock)
    server = serve_metrics(
        settings, lambda: {"dynamo_planner_gpu_seconds_total": 1.5}, lambda: not pulse.is_late
    )
    url = f"http://127.0.0.1:{unused_tcp_port}"

    async def health(session: aiohttp.ClientSession) -> tuple[int, str]:
        async with session.get(f"{url}/health") as response:
            return response.status, (await response.json())["status"]

    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
            text = await response.text()
            before = await health(session)
            pulse.beat(1.0)
            clock.advance(11.0)
            busy = await health(session)
            clock.advance(1.0)
            still = await health(session)
    finally:
        await server.close()
    assert 'dynamo_planner_gpu_seconds_total{dynamo_namespace="ns"} 1.5' in text
    assert before == busy == (200, "ready")
    assert still == (503, "standing still")
