"""Assembles a planner and runs it: as a service of a graph, or in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynaplan.config import certificates
from dynaplan.config.model_entries import components_of
from dynaplan.config.overrides import MODELS
from dynaplan.config.planner import settings_in_graph, settings_of_models
from dynaplan.config.service_config import ServiceConfig
from dynaplan.config.settings.planner import KUBERNETES, PlannerSettings, worker_sizes
from dynaplan.config.settings.servers import BACKEND_VARIABLE, ETCD_VARIABLE, has_store_address
from dynaplan.contract.store_keys import fleet_key, planner_prefix
from dynaplan.events import event_connections
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.backtesting.schedule import BacktestSchedule, window_of
from dynaplan.planner.component_connector import ComponentConnector
from dynaplan.planner.loop import PlannerLoop
from dynaplan.planner.metrics.worker_loads import HttpWorkerLoads
from dynaplan.planner.model import DecisionRecord, PlannerState
from dynaplan.planner.observer import Observer, TrafficObserver
from dynaplan.planner.own_policy import load_own_policy
from dynaplan.planner.recorders.decision_log import JsonLinesRecorder, recent_records, write_pointer
from dynaplan.planner.recorders.gauges import GaugesRecorder
from dynaplan.planner.recorders.tensorboard import TensorBoardRecorder
from dynaplan.planner.sizing.error_budget import decay_budget
from dynaplan.planner.sla_model import build_sla_model, has_profile
from dynaplan.planner.timing import FIRST_WAITING_LOG_S, WAITING_LOG_S
from dynaplan.planner.virtual.model_connector import ModelConnector
from dynaplan.planner.virtual.tuning_publisher import TuningPublisher
from dynaplan.process import process_table
from dynaplan.process.heartbeats import LATE_AFTER_S, HeartbeatFiles
from dynaplan.store import connections
from dynaplan.store.discovery import Discovery
from dynaplan.store.memory import MemoryStore
from dynaplan.util.clock import SystemClock
from dynaplan.util.connection import OnFirstUse
from dynaplan.util.entry_points import load_entry_point
from dynaplan.util.errors import ConfigError, TemporaryError, UserError
from dynaplan.util.prometheus_text import labelled

if TYPE_CHECKING:
    from dynaplan.events.port import Messenger
    from dynaplan.planner.backtesting.backtester import BacktestProcess, LiveBacktester
    from dynaplan.planner.ports import Connector, Recorder
    from dynaplan.planner.rules.sla_policy import PerformanceModel
    from dynaplan.planner.step_learning import StepLearning
    from dynaplan.store.port import KeyValueStore, Store
    from dynaplan.util.clock import Clock
    from dynaplan.worker.worker_runtime import WorkerRuntime

log = logging.getLogger(__name__)


async def start_planner(runtime: WorkerRuntime) -> None:
    """Plan in the background for as long as the process lives; raises ConfigError for a wrong option.

    Where models are loaded on request, each that has a planner is planned for by itself.
    """
    config = ServiceConfig.get_instance()
    models = settings_of_models(config, runtime.namespace)
    beat = _heartbeat(runtime.worker_name, os.environ.get("DYNAPLAN_RUNTIME_DIR"))
    connections = runtime.store, runtime.discovery, runtime.messenger, runtime.clock, beat
    if not models:
        settings = settings_in_graph(runtime.settings, runtime.namespace, config)
        _run_in(runtime, make_planner(settings, *connections), "")
        return
    from dynaplan.planner.backtesting.backtester import BacktestProcess

    components, backtests = components_of(config.get(MODELS) or {}), BacktestProcess(len(models))
    for name, settings in models.items():
        model = PlannedModel(name, components[name], backtests)
        _run_in(runtime, make_planner(settings, *connections, model), name)


def _run_in(runtime: WorkerRuntime, planner: AssembledPlanner, model: str) -> None:
    """Have the planner run in the process; ``model`` is empty where it plans for all workers."""
    runtime.on_stop(planner.close)
    runtime.add_metrics(lambda: labelled(planner.numbers(), "model", model) if model else planner.numbers())
    runtime.spawn(planner.loop.run(), f"planner {model}".strip())


@dataclass(frozen=True)
class PlannedModel:
    """A model that is one of several: its name, its component, and what computes the backtests of all."""

    name: str
    component: str
    backtests: BacktestProcess


class LoopPulse:
    """The last beat of a planner's loop, and whether the next one is overdue."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due_s = math.inf

    def beat(self, every_s: float) -> None:
        """Beat: the loop is alive, and beats again within ``every_s`` seconds."""
        self._due_s = self._clock.now_s() + every_s

    @property
    def is_late(self) -> bool:
        """True when the next beat is overdue by more than a busy machine delays one; not before the first."""
        return self._clock.now_s() > self._due_s + LATE_AFTER_S


def _heartbeat(name: str, runtime_dir: str | None) -> Callable[[float], None]:
    """Return the heartbeat of the planner of that name; without ``runtime_dir`` it does nothing."""
    if not runtime_dir:
        return lambda every_s: None
    heartbeats = HeartbeatFiles.of(Path(runtime_dir))
    return lambda every_s: heartbeats.beat(name, every_s)


async def run_planner(settings: PlannerSettings) -> None:
    """Plan until cancelled, in a process of its own, with the servers that the environment names."""
    async with AsyncExitStack() as stack:
        store = _store(settings)
        stack.push_async_callback(store.close)
        discovery = Discovery(store, settings.namespace, process_table.network())
        stack.push_async_callback(discovery.close)
        await _await_with_log(discovery.start(), "the key-value store to answer")
        if settings.environment != KUBERNETES:
            await _warn_without_fleet(store, settings.namespace)
        reconnects = settings.nats_max_reconnects
        messenger = OnFirstUse(partial(event_connections.connect_messenger, max_reconnects=reconnects))
        stack.push_async_callback(messenger.close)
        clock = SystemClock()
        pulse = LoopPulse(clock)
        planner = make_planner(settings, store, discovery, messenger, clock, pulse.beat)
        stack.push_async_callback(planner.close)
        if settings.environment == KUBERNETES:
            await _await_with_log(
                _validate_deployment(planner.connector, settings), "the Kubernetes API server to answer"
            )
        if settings.metric_reporting_prometheus_port:
            from dynaplan.planner.metrics_server import serve_metrics

            server = serve_metrics(settings, planner.numbers, lambda: not pulse.is_late)
            stack.push_async_callback(server.close)
        await planner.loop.run()


def _store(settings: PlannerSettings) -> Store:
    """Return the key-value store: on Kubernetes, where none is named, an empty one in memory.

    Raises ConfigError where the policy cannot do with that.
    """
    if (
        settings.environment != KUBERNETES
        or has_store_address(os.environ)
        or os.environ.get(BACKEND_VARIABLE)
    ):
        return connections.connect_store()
    if settings.policy != "sla" or not settings.prometheus_endpoint:
        raise ConfigError(
            f"the policy {settings.policy} cannot find the workers and frontends of this deployment",
            hint=f"Set {ETCD_VARIABLE} or {BACKEND_VARIABLE}, or policy: sla with prometheus-endpoint.",
        )
    return MemoryStore(SystemClock())


async def _validate_deployment(connector: Connector, settings: PlannerSettings) -> None:
    """Wait until the cluster answers, and check the deployment; raises DeploymentValidationError."""
    clock = SystemClock()
    planner = ComponentConnector(
        connector, clock, settings.served_model_name, deadline_s=settings.scaling_timeout_s
    )
    said = ""
    while True:
        try:
            has_prefill = bool((await connector.components()).of(Role.PREFILL))
            return await planner.validate_deployment(require_prefill=has_prefill)
        except TemporaryError as error:
            if str(error) != said:
                said = str(error)
                log.warning("the deployment is not known: %s", said)
            await clock.sleep(error.delay_s)


async def _warn_without_fleet(store: KeyValueStore, namespace: str) -> None:
    """Say in the log when no fleet plugin is there to carry decisions out."""
    try:
        has_owner = await store.get(fleet_key(namespace)) is not None
    except TemporaryError:
        return
    if not has_owner:
        log.warning(
            "no `dynaplan serve` owns the counts of %s: decisions are written to %s, and others have to "
            "carry them out; workers that were started by `dynaplan worker` stay as they are",
            namespace,
            planner_prefix(namespace),
        )


async def _await_with_log(waiting: Awaitable[None], what: str) -> None:
    """Wait, and log what is waited for (``what``) after a second, and then every 30 s."""
    task = asyncio.ensure_future(waiting)
    next_line_s = FIRST_WAITING_LOG_S
    try:
        while not (await asyncio.wait({task}, timeout=next_line_s))[0]:
            log.info("waiting for %s", what)
            next_line_s = WAITING_LOG_S
        task.result()
    finally:
        task.cancel()


class AssembledPlanner:
    """A planning loop with its open connections and files; ``numbers`` are its gauges, by name.

    ``end`` closes the connector, where it has something to close.
    """

    def __init__(
        self,
        loop: PlannerLoop,
        connector: Connector,
        observer: Observer,
        recorders: Sequence[Recorder],
        numbers: Callable[[], Mapping[str, float]],
        traffic: TrafficObserver | None = None,
        backtester: LiveBacktester | None = None,
        end: Callable[[], Awaitable[None]] | None = None,
        publisher: TuningPublisher | None = None,
    ) -> None:
        self.loop = loop
        self.connector = connector
        self.numbers = numbers
        self._observer = observer
        self._recorders = recorders
        self._traffic = traffic
        self._backtester = backtester
        self._publisher = publisher
        self._end = end

    async def close(self) -> None:
        """Close the connections to workers, frontends and a cluster, and then the files."""
        parts = (self._observer, self._traffic, self._backtester, self._publisher)
        ends = [self._end, *(part.close for part in parts if part)]
        try:
            for failure in await asyncio.gather(*(end() for end in ends if end), return_exceptions=True):
                if failure:
                    log.error("a part of the planner was not closed", exc_info=failure)
        finally:
            for recorder in self._recorders:
                recorder.close()


def make_planner(
    settings: PlannerSettings,
    store: Store,
    discovery: Discovery,
    messenger: Callable[[], Awaitable[Messenger]],
    clock: Clock,
    beat: Callable[[float], None] = lambda every_s: None,
    model: PlannedModel | None = None,
) -> AssembledPlanner:
    """Assemble a planner over these connections; it does not run yet.

    ``model`` is the one of several that it plans for, None where it plans for all workers.
    """
    metrics = HttpWorkerLoads(tls=certificates.authorities(os.environ))
    is_one_of_several = model is not None
    sla_model, learning = _model_and_learning(settings)
    observer = Observer(settings, discovery.instances, metrics, messenger, clock, is_one_of_several, learning)
    connector, end = _connector(settings, store, observer, model)
    log_root = planner_log_root(model.component if model else "")
    log_dir = log_directory(settings, log_root)
    log.info("what the planner sees and decides is written to %s", log_dir)
    gauges = GaugesRecorder(settings)
    recorders = (JsonLinesRecorder(log_dir), TensorBoardRecorder(log_dir, settings), gauges)
    records, now = recent_records(log_root, records_of_window(settings)), datetime.now(UTC)
    _point_to(log_dir, log_root)
    traffic = None
    if settings.sees_traffic:
        from dynaplan.planner.inputs import traffic_observer

        traffic = traffic_observer(settings, discovery, clock, is_one_of_several=is_one_of_several)
    backtester = _backtester(settings, restore_evidence(records, settings, now), model)
    publisher = TuningPublisher(store, settings, clock)
    loop = PlannerLoop(
        settings,
        observer,
        connector,
        recorders,
        clock,
        model=sla_model,
        traffic=traffic,
        backtester=backtester,
        beat=beat,
        state=restore_state(records[-1:], settings, now, clock.now_s()),
        own_policy=load_own_policy(settings),
        publisher=publisher,
    )
    return AssembledPlanner(
        loop, connector, observer, recorders, gauges.read, traffic, backtester, end, publisher
    )


def _point_to(log_dir: Path, log_root: Path) -> None:
    try:
        write_pointer(log_root, log_dir)
    except OSError as error:
        log.warning("`dynaplan why` may not find these decisions: %s", error)


def _sla_model(settings: PlannerSettings) -> PerformanceModel:
    model = build_sla_model(settings)
    if model.profile_note:
        log.warning("the profile %s is %s", settings.profile_results_dir, model.profile_note)
    return model


def _model_and_learning(settings: PlannerSettings) -> tuple[PerformanceModel | None, StepLearning | None]:
    """Return the model of the engines, and what learns their steps.

    Twice None for a policy without targets.
    """
    if not settings.is_by_targets:
        return None, None
    from dynaplan.planner.step_learning import learning_of

    model = _sla_model(settings)
    config, is_needed = ServiceConfig.get_instance(), not has_profile(settings)
    if is_needed:
        log.info("no profile is named: the time of the engines' steps is learnt while they serve")
    return model, learning_of(settings, config, model.service, is_needed=is_needed)


def _backtester(
    settings: PlannerSettings, evidence: BacktestSchedule, model: PlannedModel | None
) -> LiveBacktester | None:
    if not settings.has_step_times:
        return None
    from dynaplan.planner.backtesting.backtester import LiveBacktester

    return LiveBacktester(settings, evidence, model.backtests if model else None)


def _connector(
    settings: PlannerSettings, store: KeyValueStore, observer: Observer, model: PlannedModel | None
) -> tuple[Connector, Callable[[], Awaitable[None]] | None]:
    """Return the model's connector, else that of ``environment``, and what closes it; None: nothing does."""
    if model:
        return ModelConnector(store, settings.namespace, model.name, observer), None
    if settings.environment == KUBERNETES:
        connect_cluster = load_entry_point("dynaplan.connectors", KUBERNETES)
        cluster = connect_cluster(settings, observer.loads_by_host)
        return cluster, cluster.close
    from dynaplan.planner.virtual.connector import VirtualConnector

    return VirtualConnector(store, settings.namespace, observer), None


def restore_state(
    documents: Sequence[Mapping[str, Any]], settings: PlannerSettings, now: datetime, now_s: float
) -> PlannerState:
    """Return the state to begin with, by the last of these records of decisions.

    It has the error budget, faded, and what is remembered of engines' options.

    An empty one where that record cannot be read, lies in the future, or is of another promise or of none.
    ``now`` has a time zone; ``now_s`` is the same moment, monotonic, which begins anew with the machine.
    """
    begin = PlannerState()
    try:
        last = DecisionRecord.from_json(documents[-1])
        passed_s = (now - datetime.fromisoformat(last.wall_time)).total_seconds()
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, UserError):
        return begin
    before, window_s = last.settings, settings.slo_window_s
    if not before.is_by_targets or passed_s < 0 or _promise_key(before) != _promise_key(settings):
        return begin
    known = last.next_state
    options = known.options.moved(now_s - passed_s - last.observation.at_s)
    if not window_s:
        return PlannerState(options=options)
    budget = decay_budget(known.error_budget, passed_s, window_s)
    state = PlannerState(error_budget=budget, options=options)
    log.info(
        "the error budget goes on from %s: TTFT %+.0f, ITL %+.0f requests",
        last.wall_time,
        state.error_budget.ttft_requests,
        state.error_budget.itl_requests,
    )
    return state


def records_of_window(settings: PlannerSettings) -> int:
    """Return how many records hold the traffic that a backtest looks back on, and the error budget."""
    if not settings.is_by_targets:
        return 1
    return math.ceil(window_of(settings) / settings.adjustment_interval_s)


def restore_evidence(
    documents: Sequence[Mapping[str, Any]], settings: PlannerSettings, now: datetime
) -> BacktestSchedule:
    """Return a schedule with the traffic of those records that are this deployment's, within the window.

    ``now`` has a time zone.
    """
    schedule = BacktestSchedule(settings, tries_options=True)
    since = now - timedelta(seconds=window_of(settings))
    for document in documents:
        try:
            record = DecisionRecord.from_json(document)
            moment = datetime.fromisoformat(record.wall_time)
        except (KeyError, TypeError, ValueError, AttributeError, UserError):
            continue
        if since <= moment <= now and _served(record.settings) == _served(settings):
            schedule.add(record.observation)
    return schedule


def _served(settings: PlannerSettings) -> tuple[object, ...]:
    """Return the settings by which recorded traffic is known as this deployment's own.

    Its engines' steps are among them: what was missed with others says nothing of these.
    """
    sizes = (
        getattr(settings, name) for role in ("prefill", "decode") for name in worker_sizes(role).values()
    )
    return settings.namespace, settings.served_model_name, settings.adjustment_interval_s, *sizes


def _promise_key(settings: PlannerSettings) -> tuple[object, ...]:
    """Return the settings by which a recorded error budget is known as that of this deployment's promise."""
    return settings.namespace, settings.served_model_name, settings.targets(), settings.slo_window_s


def planner_log_root(component: str = "") -> Path:
    """The directory in which each start of the planner, or of that of a ``component``, makes its own."""
    return Path(os.environ.get("DYNAPLAN_LOG_DIR") or "logs") / "planner" / component


def log_directory(settings: PlannerSettings, log_root: Path) -> Path:
    """Return ``log-dir``, or without one a directory named by the time."""
    return Path(settings.log_dir) if settings.log_dir else log_root / time.strftime("%Y%m%d_%H%M%S")
