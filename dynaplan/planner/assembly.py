"""Puts a planner together: as a service of a graph, and on its own."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from dynaplan import wiring
from dynaplan.core.forecasting.warm_start import IntervalLoad, interval_history
from dynaplan.domain.discovery import public_urls
from dynaplan.domain.settings.planner import PlannerSettings
from dynaplan.foundation.connection import OnFirstUse
from dynaplan.options.planner import settings_in_graph
from dynaplan.planner.forecasts import TrafficWatch
from dynaplan.planner.loop import PlannerLoop
from dynaplan.planner.observer import Observer

if TYPE_CHECKING:
    from dynaplan.ports import Clock, KeyValueStore, Messenger, Recorder
    from dynaplan.runtime.discovery import Discovery
    from dynaplan.runtime.process import WorkerRuntime

log = logging.getLogger(__name__)


async def start_planner(runtime: WorkerRuntime) -> None:
    """Plan in the background for as long as the process lives; raises ConfigError for a wrong option."""
    settings = settings_in_graph(runtime.settings, runtime.namespace)
    planner = make_planner(settings, runtime.store, runtime.discovery, runtime.messenger, runtime.clock)
    runtime.on_stop(planner.close)
    runtime.add_metrics(planner.numbers)
    runtime.spawn(planner.loop.run(), "planner")


def check_sources(settings: PlannerSettings) -> None:
    """Raise ConfigError for what a planner of these settings would not find.

    That is a profile, a trace or a library; a Prometheus server only needs to have an address.
    """
    if settings.is_by_targets:
        if settings.prometheus_endpoint:
            wiring.prometheus_traffic(settings.prometheus_endpoint, settings)
        wiring.sla_model(settings, {})
        wiring.make_forecaster(settings, settings.adjustment_interval_s)
        _warm_up(settings)


async def run_planner(settings: PlannerSettings) -> None:
    """Plan until cancelled, in a process of its own: ``ETCD_ENDPOINTS`` and ``NATS_SERVER`` say where."""
    from dynaplan.runtime.discovery import Discovery

    async with AsyncExitStack() as stack:
        store = wiring.connect_store()
        stack.push_async_callback(store.close)
        discovery = Discovery(store, settings.namespace)
        stack.push_async_callback(discovery.close)
        await discovery.start()
        messenger = OnFirstUse(wiring.connect_messenger)
        stack.push_async_callback(messenger.close)
        planner = make_planner(settings, store, discovery, messenger, wiring.system_clock())
        stack.push_async_callback(planner.close)
        if settings.metric_reporting_prometheus_port:
            from dynaplan.planner.metrics_server import serve_metrics

            port = settings.metric_reporting_prometheus_port
            server = await serve_metrics(port, settings.namespace, planner.numbers)
            stack.push_async_callback(server.cleanup)
        await planner.loop.run()


class Planner:
    """A planning loop and what it has open; ``numbers`` are its gauges, by name."""

    def __init__(
        self,
        loop: PlannerLoop,
        observer: Observer,
        recorders: Sequence[Recorder],
        numbers: Callable[[], Mapping[str, float]],
        traffic: TrafficWatch | None = None,
    ) -> None:
        self.loop = loop
        self.numbers = numbers
        self._observer = observer
        self._recorders = recorders
        self._traffic = traffic

    async def close(self) -> None:
        """Close the connections to workers and frontends, and the files."""
        await self._observer.close()
        if self._traffic:
            await self._traffic.close()
        for recorder in self._recorders:
            recorder.close()


def make_planner(
    settings: PlannerSettings,
    store: KeyValueStore,
    discovery: Discovery,
    messenger: Callable[[], Awaitable[Messenger]],
    clock: Clock,
) -> Planner:
    """A planner over these connections, not running yet."""
    observer = Observer(settings, discovery.instances, wiring.worker_metrics(), messenger, clock)
    connector = wiring.planner_connector(store, settings.namespace, observer.registered)
    log_dir = log_directory(settings)
    log.info("what the planner sees and decides is written to %s", log_dir)
    gauges = wiring.planner_gauges(settings)
    recorders = (*wiring.planner_recorders(log_dir, settings), gauges)
    try:
        wiring.announce_log_dir(planner_log_root(), log_dir)
    except OSError as error:
        log.warning("`dynaplan why` may not find these decisions: %s", error)
    model, traffic = None, None
    if settings.is_by_targets:
        model = wiring.sla_model(settings, {})
        traffic = _watch(settings, discovery, clock)
    loop = PlannerLoop(settings, observer, connector, recorders, clock, model=model, traffic=traffic)
    return Planner(loop, observer, recorders, gauges.read, traffic)


def _watch(settings: PlannerSettings, discovery: Discovery, clock: Clock) -> TrafficWatch:
    interval_s, before = settings.adjustment_interval_s, _warm_up(settings)
    if settings.prometheus_endpoint:
        source = wiring.prometheus_traffic(settings.prometheus_endpoint, settings)
    else:
        source = wiring.frontend_traffic(lambda: public_urls(discovery.all()), settings, clock)
    return TrafficWatch(settings, source, wiring.make_forecaster(settings, interval_s), clock, before)


def _warm_up(settings: PlannerSettings) -> list[IntervalLoad]:
    trace = settings.load_predictor_warmup_trace
    if not trace:
        return []
    before = interval_history(wiring.read_requests(trace, 1.0, 0), settings.adjustment_interval_s)
    log.info("the history begins with %d intervals of %s", len(before), trace)
    return before


def planner_log_root() -> Path:
    """Where the planners of this deployment log, each into a directory of its own."""
    return Path(os.environ.get("DYNAPLAN_LOG_DIR") or "logs") / "planner"


def log_directory(settings: PlannerSettings) -> Path:
    """``log-dir``, or else a directory named by the time."""
    if settings.log_dir:
        return Path(settings.log_dir)
    return planner_log_root() / time.strftime("%Y%m%d_%H%M%S")
