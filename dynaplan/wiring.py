"""The fuse box: the only module that names concrete adapters. Imports each one only when it is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynaplan.domain.errors import ConfigError, nearest
from dynaplan.domain.model_catalogue import CATALOGUE

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from dynaplan.core.engine.kv_memory import MemoryNeed
    from dynaplan.core.engine.timing import StepTiming
    from dynaplan.core.planning.sla_policy import SlaModel
    from dynaplan.domain.engine import EngineContext
    from dynaplan.domain.engine_api import EngineApi
    from dynaplan.domain.gpus import Gpu, GpuUse
    from dynaplan.domain.identity import ProcessIdentity
    from dynaplan.domain.memory import BoxMemory
    from dynaplan.domain.planning.observation import FleetCounts
    from dynaplan.domain.pulse import Heartbeats
    from dynaplan.domain.settings.forecasting import ForecastSettings
    from dynaplan.domain.settings.planner import PlannerSettings
    from dynaplan.domain.settings.worker import SimOptions
    from dynaplan.domain.trace import TracedRequest
    from dynaplan.ports import (
        Claims,
        Clock,
        Connector,
        DocumentStore,
        Engine,
        Forecaster,
        GaugeRecorder,
        KeyValueStore,
        Messenger,
        MetricsSource,
        Processes,
        Recorder,
        StartupTimes,
        Store,
        TrafficSource,
    )

ENGINES: Mapping[str, str] = {
    "sim": "sim.engine",
    "llamacpp": "llamacpp.engine",
    "vllm": "vllm",
    "sglang": "sglang",
    "trtllm": "trtllm",
}
"""The values of ``engine:``, and the module of ``adapters/engines`` that makes and checks each."""


ENGINE_APIS = frozenset(ENGINES) - {"sim"}
"""The engines whose API a module of ``adapters/engines/apis`` describes; the simulated one checks all."""


def system_clock() -> Clock:
    """Return the machine's monotonic clock."""
    from dynaplan.adapters.clock import SystemClock

    return SystemClock()


def connect_store() -> Store:
    """Return a connection to the key-value store that ``ETCD_ENDPOINTS`` names."""
    from dynaplan.adapters.stores.etcd import EtcdStore

    return EtcdStore.from_environment(os.environ)


async def connect_messenger() -> Messenger:
    """Return a connection to the messaging server that ``NATS_SERVER`` names."""
    from dynaplan.adapters.messaging.nats import NatsMessenger

    return await NatsMessenger.from_environment(os.environ)


def make_engine(name: str, options: Mapping[str, Any], context: EngineContext) -> Engine:
    """The inference engine of that name, not started; ConfigError for an unknown one or a wrong option.

    The keys of ``options`` are in kebab-case.
    """
    engine: Engine = _engine_module(name).make(options, context)
    return engine


def engine_api(name: str) -> EngineApi:
    """The part of that engine's API that frontends must know; one without bounds for an unknown engine."""
    from dynaplan.domain.engine_api import EngineApi

    if name not in ENGINE_APIS:
        return EngineApi()
    api: EngineApi = import_module(f"dynaplan.adapters.engines.apis.{name}").API
    return api


def check_engine(name: str, options: Mapping[str, Any], gpus: float) -> list[str]:
    """Raise the ConfigError that making and starting this engine would; nothing is made. The warnings.

    ``gpus`` is the ``resources.gpu`` of one worker. Also looks at the model's files, and whether the engine
    is installed.
    """
    module = _engine_module(name)
    from dynaplan.adapters.engines.common.model_files import check_model
    from dynaplan.adapters.engines.common.requirements import check_installed

    warnings = check_model(name, options.get("model"))
    module.check(options, gpus)
    check_installed(name, options)
    return warnings


def memory_need(name: str, options: Mapping[str, Any], gpus: float) -> MemoryNeed | None:
    """Return the memory that one worker of this engine takes; None when its model's files do not tell it."""
    from dynaplan.adapters.engines.common import memory_needs

    return memory_needs.memory_need(name, options, gpus)


def box_memory() -> BoxMemory:
    """Return the memory of this box."""
    from dynaplan.adapters.local import box_memory

    return box_memory.box_memory()


def model_location(name: str, model: Any, directory: Path) -> tuple[Any, str]:
    """The model as workers of this engine must be told it, and what clients may call it.

    A path in ``directory`` becomes absolute; the public name is empty when the model has one already. A
    pulled model is told by its path and called by its name. ConfigError for one that was never pulled.
    """
    from dynaplan.adapters.engines.common.model_files import absolute_path, public_name
    from dynaplan.adapters.local.pulled_models import pulled_file

    pulled = pulled_file(model, directory, os.environ) if name == "llamacpp" else None
    if pulled:
        return str(pulled), model
    location = absolute_path(name, model, directory)
    return location, public_name(name, location)


def package_of(engine: str) -> str:
    """Return what pip installs for that engine."""
    from dynaplan.adapters.engines.common.requirements import REQUIREMENTS

    return REQUIREMENTS[engine].package


def pull_model(name: str) -> Path:
    """Fetch a model of the catalogue into the user's cache unless it is there; return its path."""
    from dynaplan.adapters.local.pulled_models import models_dir, pull

    return pull(CATALOGUE[name], models_dir(os.environ))


def is_pulled(name: str) -> bool:
    """Tell whether the file of that model is in the user's cache."""
    from dynaplan.adapters.local.pulled_models import models_dir

    return (models_dir(os.environ) / CATALOGUE[name].file).is_file()


def _engine_module(name: str) -> Any:
    if name not in ENGINES:
        known, meant = f"expected one of: {', '.join(ENGINES)}", nearest(name, ENGINES)
        hint = f"{meant} ({known})" if meant.startswith("Did") else known
        raise ConfigError(f"engine is {name!r}, which is unknown", hint=hint)
    return import_module(f"dynaplan.adapters.engines.{ENGINES[name]}")


def statefile_path(namespace: str) -> Path:
    """Return the path of a namespace's statefile, for this user."""
    from dynaplan.adapters.local import statefile

    return statefile.statefile_path(os.environ, namespace)


def open_statefile(path: Path) -> DocumentStore:
    """Return the statefile at that path."""
    from dynaplan.adapters.local.statefile import StatefileStore

    return StatefileStore(path)


def heartbeats(runtime_dir: Path) -> Heartbeats:
    """Return the heartbeats of the deployment with that directory."""
    from dynaplan.adapters.local.heartbeats import HeartbeatFiles

    return HeartbeatFiles(runtime_dir / "heartbeats")


def oom_kills() -> tuple[int, str]:
    """Return how many processes the kernel's out-of-memory killer has ended so far, and where."""
    from dynaplan.adapters.local.out_of_memory import oom_kills

    return oom_kills()


def startup_times(statefile: Path) -> StartupTimes:
    """Return the start-up times that deployments with statefiles beside this one have learnt."""
    from dynaplan.adapters.local.startup_times import StartupTimesFile

    return StartupTimesFile(statefile.parent)


def namespace_lock(path: Path) -> AbstractContextManager[object]:
    """Return the right to run the namespace of that statefile: held inside a ``with`` block."""
    from dynaplan.adapters.local.statefile import NamespaceLock

    return NamespaceLock(path)


def gpu_inventory(number: int | None) -> tuple[tuple[Gpu, ...], bool]:
    """Return the GPUs that a deployment may use, and whether they are simulated."""
    from dynaplan.adapters.local.gpu_uses import busy_now
    from dynaplan.adapters.local.gpus import inventory

    return inventory(number, os.environ, busy=busy_now)


def gpu_uses(gpus: Sequence[Gpu]) -> Callable[[], Mapping[int, GpuUse]]:
    """Return the reader of these GPUs' memory in use, real or simulated; it may block, and never raises."""
    from dynaplan.adapters.local.claims import node_dir
    from dynaplan.adapters.local.gpu_uses import uses_reader

    return uses_reader(gpus, node_dir(os.environ))


def gpu_claims(arbiter: ProcessIdentity, namespace: str) -> Claims:
    """Return this arbiter's claims, which keep the arbiters of the machine off each other's GPUs."""
    from dynaplan.adapters.local.claims import NodeClaims, node_dir

    return NodeClaims(arbiter, namespace, node_dir(os.environ))


def port_holder(port: int) -> str:
    """Return the process that listens on that TCP port, in words; empty when none is seen."""
    from dynaplan.adapters.local import port_holders

    return port_holders.port_holder(port)


def deployments_of_machine() -> dict[int, tuple[str, Path | None]]:
    """Return all users' deployments that hold GPUs: pid of ``serve`` -> words, and where its statefile is."""
    from dynaplan.adapters.local.claims import claimants, node_dir

    return claimants(node_dir(os.environ))


def processes() -> Processes:
    """Return the processes of this machine."""
    from dynaplan.adapters.local import processes

    return processes


def planner_connector(
    store: KeyValueStore, namespace: str, registered: Callable[[], FleetCounts]
) -> Connector:
    """Return the connector for decisions; ``registered`` counts the workers where no supervisor does."""
    from dynaplan.adapters.connectors.virtual import VirtualConnector

    return VirtualConnector(store, namespace, registered)


def worker_metrics() -> MetricsSource:
    """Return the source of the load of workers, read over HTTP."""
    from dynaplan.adapters.metrics.http import HttpMetrics

    return HttpMetrics()


def planner_recorders(log_dir: Path, settings: PlannerSettings) -> Sequence[Recorder]:
    """Return the recorders that write the planner's decisions and curves into that directory."""
    from dynaplan.adapters.recorders.jsonl import JsonLinesRecorder
    from dynaplan.adapters.recorders.tensorboard import TensorBoardRecorder

    return JsonLinesRecorder(log_dir), TensorBoardRecorder(log_dir, settings)


def planner_gauges(settings: PlannerSettings) -> GaugeRecorder:
    """Return the recorder that keeps the planner's numbers for its ``/metrics``."""
    from dynaplan.adapters.recorders.gauges import GaugesRecorder

    return GaugesRecorder(settings)


def announce_log_dir(planner_dir: Path, log_dir: Path) -> None:
    """Leave word in ``planner_dir`` where the newest planner logs; raises OSError when it cannot."""
    from dynaplan.adapters.recorders.jsonl import point_to

    point_to(planner_dir, log_dir)


def recent_decisions(planner_dir: Path, last: int) -> list[dict[str, Any]]:
    """The last records of the planners that left word there, oldest first, for ``explain``."""
    from dynaplan.adapters.recorders.jsonl import recent_records

    return recent_records(planner_dir, last)


def recorded_decisions(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every record of a ``decisions.jsonl``, with the number of its line; of a directory, the newest one's.

    Raises ConfigError for a path that leads to none.
    """
    from dynaplan.adapters.recorders.jsonl import find_recording, read_all

    return read_all(find_recording(path))


def engine_timing(options: SimOptions) -> tuple[StepTiming, int]:
    """Return the step times of the simulated engine, and the number of KV tokens in its profile."""
    from dynaplan.adapters.engines.sim.profiles import timing_for

    return timing_for(options)


def engine_profile(options: SimOptions) -> str:
    """The name of the profile that times the simulated engine."""
    from dynaplan.adapters.engines.sim.profiles import profile_name

    return profile_name(options)


def read_requests(trace: str, rate_scale: float, seed: int) -> Iterator[TracedRequest]:
    """Yield the requests of a trace file, or of made-up load, at ``rate_scale`` times their rate."""
    from dynaplan.adapters.traces.reading import read_trace
    from dynaplan.adapters.traces.shaping import scaled
    from dynaplan.adapters.traces.synthetic import is_synthetic, synthetic

    requests = synthetic(trace) if is_synthetic(trace) else read_trace(Path(trace))
    return scaled(requests, rate_scale, seed=seed)


def make_forecaster(settings: ForecastSettings, interval_s: float) -> Forecaster:
    """The forecaster that ``load_predictor`` names; ``interval_s`` lies between two values of a history.

    ConfigError when the library that ``load_predictor`` needs is not installed.
    """
    from dynaplan.domain.settings.forecasting import OUTSIDE_PREDICTORS

    if settings.load_predictor in OUTSIDE_PREDICTORS:
        from dynaplan.adapters.forecasters.library_forecaster import LibraryForecaster, check_installed

        check_installed(settings.load_predictor)
        return LibraryForecaster(settings, interval_s)
    from dynaplan.adapters.forecasters.core_forecaster import CoreForecaster

    return CoreForecaster(settings)


def sla_model(
    settings: PlannerSettings,
    engine: Mapping[str, Any],
    router: str = "round-robin",
    *,
    prefill_engine: Mapping[str, Any] | None = None,
) -> SlaModel:
    """Return the model that the SLA policy plans with, by the settings' profile; raises ConfigError."""
    from dynaplan.adapters.profiles.sla_model import model_of

    return model_of(settings, engine, router, engine if prefill_engine is None else prefill_engine)


def frontend_traffic(
    urls: Callable[[], Iterable[str]], settings: PlannerSettings, clock: Clock
) -> TrafficSource:
    """The traffic of the planner's namespace and model as the frontends at these addresses count it."""
    from dynaplan.adapters.metrics.frontends import FrontendsTraffic

    model = settings.served_model_name or ""
    return FrontendsTraffic(urls, settings.namespace, clock, model=model, prefix=_metrics_prefix())


def prometheus_traffic(endpoint: str, settings: PlannerSettings) -> TrafficSource:
    """The traffic of the planner's namespace and model as a Prometheus server has it.

    Raises ConfigError when ``endpoint`` is not the address of one.
    """
    from dynaplan.adapters.metrics.prometheus import PrometheusTraffic

    model = settings.served_model_name or ""
    return PrometheusTraffic(endpoint, settings.namespace, model=model, prefix=_metrics_prefix())


def _metrics_prefix() -> str:
    """Return the prefix of the names of the frontends' metrics."""
    from dynaplan.adapters.metrics.exposition import DEFAULT_PREFIX

    return os.environ.get("DYN_METRICS_PREFIX") or DEFAULT_PREFIX
