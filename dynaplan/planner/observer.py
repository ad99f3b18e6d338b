"""The measurements of a planner: the load of the workers at each pull, the traffic and its forecast.

A worker that does not answer leaves a gap, not an exception.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from dynaplan.contract.counts import FleetCounts, Sample, WorkerCounts
from dynaplan.engines.worker_load import WorkerLoad, kv_pressure
from dynaplan.events.prefill_requests import prefill_stream
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.deployment import ScaledComponent
from dynaplan.planner.forecasting.traffic_history import TrafficHistory
from dynaplan.planner.learnt_timings import LearntTimings
from dynaplan.planner.sizing.demand_forecast import forecast_traffic
from dynaplan.planner.timing import QUEUE_TIMEOUT_S, WAITING_LOG_S
from dynaplan.store.instances import Instance, host_of

if TYPE_CHECKING:
    from dynaplan.config.settings.planner import PlannerSettings
    from dynaplan.contract.traffic import Traffic
    from dynaplan.events.port import Messenger, WorkQueue
    from dynaplan.planner.forecasting.traffic_history import IntervalLoad
    from dynaplan.planner.model import TrafficForecast
    from dynaplan.planner.ports import Forecaster, TrafficSource, WorkerLoadSource
    from dynaplan.planner.step_learning import StepLearning
    from dynaplan.util.clock import Clock

log = logging.getLogger(__name__)


class Observer:
    """Reads the load of a deployment.

    ``instances`` gives the instances of a component; ``messenger`` connects to the prefill queue, and is
    called only once prefill workers are registered. One of several models has a queue of its own.
    """

    def __init__(
        self,
        settings: PlannerSettings,
        instances: Callable[[str], Sequence[Instance]],
        metrics: WorkerLoadSource,
        messenger: Callable[[], Awaitable[Messenger]],
        clock: Clock,
        is_one_of_several: bool = False,
        learning: StepLearning | None = None,
    ) -> None:
        self._settings = settings
        self._learning = learning
        component = settings.prefill_component if is_one_of_several else ""
        self._stream = prefill_stream(settings.namespace, component)
        self._instances = instances
        self._metrics = metrics
        self._messenger = messenger
        self._clock = clock
        self._queue: WorkQueue | None = None
        self._is_queue_unavailable = False
        self._loads_by_host: dict[str, WorkerLoad] = {}

    def registered(self) -> FleetCounts:
        """Return the registered workers as a fleet in which every worker is ready."""
        prefill = len(self._instances(self._settings.prefill_component))
        decode = len(self._instances(self._settings.decode_component))
        return FleetCounts(WorkerCounts(ready=prefill), WorkerCounts(ready=decode))

    def loads_by_host(self) -> Mapping[str, WorkerLoad]:
        """Return the newest load of the workers that have answered, by the host in their address."""
        return self._loads_by_host

    def components(self) -> list[ScaledComponent]:
        """Return the components whose workers are registered, with the models that they serve."""
        names = {
            Role.PREFILL: self._settings.prefill_component,
            Role.DECODE: self._settings.decode_component,
        }
        found = []
        for role, name in names.items():
            if instances := self._instances(name):
                models = {str(each.card["model"]) for each in instances if each.card.get("model")}
                found.append(ScaledComponent(role, name, tuple(sorted(models))))
        return found

    async def pull(self) -> Sample:
        """Pull the metrics once; takes a second at most."""
        fleet = self.registered()
        settings = self._settings
        loads, prefill, (depth, queue_missing) = await asyncio.gather(
            self._loads(Role.DECODE, settings.decode_component),
            self._loads(Role.PREFILL, settings.prefill_component),
            self._queue_depth(fleet.prefill.ready),
        )
        asleep = sum(load.is_asleep for load in loads)
        prefill_asleep = sum(load.is_asleep for load in prefill)
        awake = [load for load in loads if not load.is_asleep]
        return Sample(
            at_s=self._clock.now_s(),
            kv_usage=sum(map(kv_pressure, awake)) / len(awake) if awake else None,
            kv_missing="" if awake else _why_no_load(fleet.decode.ready, asleep),
            prefill_queue=depth,
            queue_missing=queue_missing,
            waiting_requests=sum(load.waiting_requests for load in awake),
            prefill_workers=max(0, fleet.prefill.ready - prefill_asleep),
            decode_workers=max(0, fleet.decode.ready - asleep),
            decode_asleep=asleep,
            prefill_asleep=prefill_asleep,
        )

    async def close(self) -> None:
        """Write what was learnt to its files, and close the connections to the workers."""
        if self._learning:
            self._learning.save(self._clock.now_s(), is_due=True)
        await self._metrics.close()

    def learnt(self) -> LearntTimings:
        """Return what the engines' counters have told so far; once a minute it is written to files."""
        if self._learning is None:
            return LearntTimings()
        self._learning.save(self._clock.now_s())
        return self._learning.known()

    async def _loads(self, role: Role, component: str) -> list[WorkerLoad]:
        urls = [instance.url for instance in self._instances(component)]
        loads = await self._metrics.loads(urls) if urls else ()
        if self._learning:
            self._learning.read(role, dict(zip(urls, loads, strict=True)))
        self._loads_by_host |= {host_of(url): load for url, load in zip(urls, loads, strict=True) if load}
        return [load for load in loads if load and math.isfinite(load.kv_usage)]

    async def _queue_depth(self, prefill_workers: int) -> tuple[float | None, str]:
        if not prefill_workers:
            return None, "no prefill worker is registered"
        try:
            async with asyncio.timeout(QUEUE_TIMEOUT_S):
                if self._queue is None:
                    messenger = await self._messenger()
                    self._queue = await messenger.queue(self._stream)
                depth = await self._queue.depth()
        except Exception as error:
            # Whatever the client of the messaging server raises: the next pull tries again.
            self._log_unavailable(error)
            return None, "the prefill queue did not answer"
        self._is_queue_unavailable = False
        return float(depth), ""

    def _log_unavailable(self, error: Exception) -> None:
        level = logging.DEBUG if self._is_queue_unavailable else logging.WARNING
        log.log(level, "the prefill queue does not answer: %s: %s", type(error).__name__, error)
        self._is_queue_unavailable = True


def _why_no_load(registered: int, asleep: int) -> str:
    if not registered:
        return "no decode worker is registered"
    if asleep:
        return f"every decode worker that answers is asleep, {asleep} of {registered}: `dynaplan wake`"
    return f"none of the {registered} decode workers answered"


class TrafficObserver:
    """Reads a source of traffic, keeps its history, and has it forecast.

    ``before`` is the history that a warm-up trace gives.
    """

    def __init__(
        self,
        settings: PlannerSettings,
        source: TrafficSource,
        forecaster: Forecaster,
        clock: Clock,
        before: Iterable[IntervalLoad] = (),
    ) -> None:
        self._settings = settings
        self._source = source
        self._forecaster = forecaster
        self._clock = clock
        self._history = TrafficHistory(settings.adjustment_interval_s, before)
        self._seen_s = clock.now_s()
        self._missing = ""
        self._next_line_s = 0.0

    async def pull(self) -> None:
        """Have the source take one sample of the frontends' traffic."""
        await self._source.pull()

    async def observe(self, startup_s: float) -> tuple[Traffic, TrafficForecast]:
        """Add the traffic since the last call to the history; return it, and its forecast.

        That reaches until a worker that is started now is ready, after ``startup_s`` seconds.
        """
        now_s = self._clock.now_s()
        traffic = await self._source.traffic(max(now_s - self._seen_s, 1e-3))
        self._seen_s = now_s
        self._log_missing(traffic.missing if traffic.requests is None else "")
        self._history.add(traffic)
        method = self._forecaster.forecast_all
        return traffic, await forecast_traffic(self._history, method, startup_s, self._settings)

    async def close(self) -> None:
        """Close the source's connections, and end the processes that compute forecasts."""
        try:
            await self._source.close()
        finally:
            await self._forecaster.close()

    def _log_missing(self, missing: str) -> None:
        if missing and (not self._missing or self._seen_s >= self._next_line_s):
            log.warning("the traffic is not known: %s", missing)
            self._next_line_s = self._seen_s + WAITING_LOG_S
        elif self._missing and not missing:
            log.info("the traffic is known again")
        self._missing = missing
