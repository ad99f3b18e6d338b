"""The inputs and outputs of planning: metrics, traffic, traces, forecasts, profiles, recordings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynaplan.config import certificates
from dynaplan.graph.lifecycle import Role

if TYPE_CHECKING:
    from dynaplan.config.settings.planner import ForecastSettings, PlannerSettings
    from dynaplan.engines.worker_load import WorkerLoad
    from dynaplan.fleet.counts import FleetCounts
    from dynaplan.gateway.traced_requests import TracedRequest
    from dynaplan.planner.kubernetes.workloads import Workloads
    from dynaplan.planner.model.components import ScaledComponent
    from dynaplan.planner.ports import (
        ClusterConnector,
        Connector,
        Forecaster,
        GaugeRecorder,
        MetricsSource,
        PlannerConnector,
        Recorder,
        TrafficSource,
    )
    from dynaplan.planner.profiles.aiconfigurator import AiConfigurator
    from dynaplan.planner.rules.sla_policy import SlaModel
    from dynaplan.store.port import KeyValueStore
    from dynaplan.util.clock import Clock


GRAPH_DEPLOYMENT_VARIABLE = "DYN_PARENT_DGD_K8S_NAME"
"""The environment variable that names the DynamoGraphDeployment of a planner; Dynamo's operator sets it."""


def planner_connector(
    store: KeyValueStore,
    namespace: str,
    registered: Callable[[], FleetCounts],
    components: Callable[[], Sequence[ScaledComponent]],
) -> Connector:
    """Return the connector for decisions over the key-value store.

    ``registered`` counts the workers where no supervisor does, ``components`` tells what they are.
    """
    from dynaplan.planner.connectors.virtual import VirtualConnector

    return VirtualConnector(store, namespace, registered, registered_components=components)


def cluster_connector(
    settings: PlannerSettings,
    loads: Callable[[], Mapping[str, WorkerLoad]],
    environ: Mapping[str, str] = os.environ,
) -> ClusterConnector:
    """Return the connector for a cluster, of the DynamoGraphDeployment that the environment names, if any.

    ``loads`` gives the newest loads of workers by the address of their pod. Raises ConfigError without
    a client library or credentials.
    """
    from dynaplan.planner.connectors.kubernetes import KubernetesConnector
    from dynaplan.planner.kubernetes.carrying_out import Budget
    from dynaplan.planner.kubernetes.deletion_costs import DeletionCosts
    from dynaplan.planner.kubernetes.graph_deployment import GraphDeployment
    from dynaplan.planner.kubernetes.intent import IntentMap
    from dynaplan.planner.kubernetes.labelled import LabelledWorkloads
    from dynaplan.store.kubernetes_client import KubernetesClient

    client = KubernetesClient.from_environment(environ)
    gpus = {Role.PREFILL: settings.prefill_engine_num_gpu, Role.DECODE: settings.decode_engine_num_gpu}
    names = {Role.PREFILL: [settings.prefill_component], Role.DECODE: [settings.decode_component]}
    if name := environ.get(GRAPH_DEPLOYMENT_VARIABLE):
        workloads: Workloads = GraphDeployment(client, name, names)
    else:
        workloads = LabelledWorkloads(client, settings.namespace)
    return KubernetesConnector(
        workloads,
        IntentMap(client, settings.namespace),
        Budget(settings.max_gpu_budget, gpus),
        before_removal=DeletionCosts(client, loads).mark,
        end=client.close,
        acts=not settings.no_operation,
    )


def component_connector(connector: Connector, settings: PlannerSettings, clock: Clock) -> PlannerConnector:
    """Return the interface of Dynamo's planners over a connector."""
    from dynaplan.planner.connectors.components import ComponentConnector

    return ComponentConnector(
        connector, clock, settings.served_model_name, deadline_s=settings.scaling_timeout_s
    )


def worker_metrics() -> MetricsSource:
    """Return the source of the load of workers, read over HTTP."""
    from dynaplan.planner.metrics.http import HttpMetrics

    return HttpMetrics(tls=certificates.authorities(os.environ))


def planner_recorders(log_dir: Path, settings: PlannerSettings) -> Sequence[Recorder]:
    """Return the recorders that write the planner's decisions and curves into that directory."""
    from dynaplan.planner.recorders.jsonl import JsonLinesRecorder
    from dynaplan.planner.recorders.tensorboard import TensorBoardRecorder

    return JsonLinesRecorder(log_dir), TensorBoardRecorder(log_dir, settings)


def planner_gauges(settings: PlannerSettings) -> GaugeRecorder:
    """Return the recorder that keeps the planner's numbers for its ``/metrics``."""
    from dynaplan.planner.recorders.gauges import GaugesRecorder

    return GaugesRecorder(settings)


def announce_log_dir(planner_dir: Path, log_dir: Path) -> None:
    """Leave word in ``planner_dir`` where the newest planner logs; raises OSError when it cannot."""
    from dynaplan.planner.recorders.jsonl import point_to

    point_to(planner_dir, log_dir)


def recent_decisions(planner_dir: Path, last: int, tail_bytes: int | None = None) -> list[dict[str, Any]]:
    """The last records of the planners that left word there, oldest first, for ``explain``.

    ``tail_bytes`` at the end of each log are looked through; None: 1 MiB.
    """
    from dynaplan.planner.recorders.jsonl import TAIL_BYTES, recent_records

    return recent_records(planner_dir, last, TAIL_BYTES if tail_bytes is None else tail_bytes)


def recorded_decisions(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every record of a ``decisions.jsonl``, with the number of its line; of a directory, the newest one's.

    Raises ConfigError for a path that leads to none.
    """
    from dynaplan.planner.recorders.jsonl import find_recording, read_all

    return read_all(find_recording(path))


def read_requests(trace: str, rate_scale: float, seed: int) -> Iterator[TracedRequest]:
    """Yield the requests of a trace file, a directory of them, or made-up load, at ``rate_scale`` times their
    rate."""
    from dynaplan.simulation.traces.reading import read_trace
    from dynaplan.simulation.traces.shaping import scaled
    from dynaplan.simulation.traces.synthetic import is_synthetic, synthetic

    requests = synthetic(trace, seed) if is_synthetic(trace) else read_trace(Path(trace))
    return scaled(requests, rate_scale, seed=seed)


def make_forecaster(settings: ForecastSettings, interval_s: float) -> Forecaster:
    """The forecaster that ``load_predictor`` names; ``interval_s`` lies between two values of a history.

    ConfigError when the library that ``load_predictor`` needs is not installed.
    """
    from dynaplan.config.settings.planner import OUTSIDE_PREDICTORS

    if settings.load_predictor in OUTSIDE_PREDICTORS:
        from dynaplan.planner.forecasting.library_forecaster import LibraryForecaster, check_installed

        check_installed(settings.load_predictor)
        return LibraryForecaster(settings, interval_s)
    from dynaplan.planner.forecasting.core_forecaster import CoreForecaster

    return CoreForecaster(settings)


def sla_model(
    settings: PlannerSettings,
    engine: Mapping[str, Any],
    router: str = "round-robin",
    *,
    prefill_engine: Mapping[str, Any] | None = None,
) -> SlaModel:
    """Return the model that the SLA policy plans with, by the settings' profile; raises ConfigError."""
    from dynaplan.planner.profiles.sla_model import model_of

    return model_of(settings, engine, router, engine if prefill_engine is None else prefill_engine)


def operator_times(model: str, gpu_type: str, engine: str) -> AiConfigurator:
    """Return aiconfigurator's times of a model; raises ConfigError when it is not installed."""
    from dynaplan.planner.profiles.aiconfigurator import find_aiconfigurator

    return find_aiconfigurator(model, gpu_type, engine)


def frontend_traffic(
    urls: Callable[[], Iterable[str]], settings: PlannerSettings, clock: Clock
) -> TrafficSource:
    """The traffic of the planner's namespace and model as the frontends at these addresses count it."""
    from dynaplan.planner.metrics.frontends import FrontendsTraffic

    model = settings.served_model_name or ""
    tls = certificates.authorities(os.environ)
    return FrontendsTraffic(urls, settings.namespace, clock, model=model, prefix=metrics_prefix(), tls=tls)


def prometheus_traffic(endpoint: str, settings: PlannerSettings) -> TrafficSource:
    """The traffic of the planner's namespace and model as a Prometheus server has it.

    Raises ConfigError when ``endpoint`` is not the address of one.
    """
    from dynaplan.planner.metrics.prometheus import PrometheusTraffic

    model = settings.served_model_name or ""
    return PrometheusTraffic(endpoint, settings.namespace, model=model, prefix=metrics_prefix())


def frontend_times(namespace: str) -> Callable[[bytes], Mapping[tuple[str, str], float]]:
    """Return the reader of a frontend's ``/metrics``: counts, and the buckets of TTFT and ITL.

    It raises ValueError for a text without them.
    """
    from dynaplan.planner.metrics.exposition import ITL, TTFT, Exposition

    return Exposition(metrics_prefix(), namespace, buckets=(TTFT, ITL)).read


def metrics_prefix() -> str:
    """Return the prefix of the names of the frontends' metrics."""
    from dynaplan.planner.metrics.exposition import DEFAULT_PREFIX

    return os.environ.get("DYN_METRICS_PREFIX") or DEFAULT_PREFIX
