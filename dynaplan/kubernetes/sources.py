"""The deployment that is exported: one that runs on this box, or one that a graph describes."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dynaplan.config.overrides import MODELS, Sections, merge_sections, parse_overrides
from dynaplan.config.service_config import section_options
from dynaplan.config.settings.servers import TOKEN_VARIABLE
from dynaplan.contract.store_keys import SCALED_ROLES
from dynaplan.fleet.startup_times import StartupTimesFile, median_startup_s, startup_key
from dynaplan.fleet.statefile_store import statefile_path
from dynaplan.graph.lifecycle import COUNTS, Role, Worker
from dynaplan.graph.model import GraphSpec
from dynaplan.util.errors import ConfigError


@dataclass(frozen=True)
class ExportSource:
    """A deployment as this box knows it.

    ``counts`` are its workers by role, ``token`` the one of its workers, empty for a new one. ``startup_s``
    is how long the slower of its workers usually takes to start here, None where none has. ``log_dir`` is
    where its planners write decisions. ``warnings`` are those of the configuration.
    """

    spec: GraphSpec
    config: Sections
    counts: Mapping[Role, int]
    token: str = field(default="", repr=False)
    startup_s: float | None = None
    log_dir: Path | None = None
    warnings: tuple[str, ...] = ()


def refuse_on_request() -> ConfigError:
    """Return the error for models that are loaded on request."""
    return ConfigError(
        "models that are loaded on request share the memory of one machine, and have no manifests",
        hint="Export a deployment of each model: "
        "dynaplan export kubernetes graphs.agg:Frontend -f agg.yaml --Common.model=MODEL --image IMAGE",
    )


def graph_source(
    graph: str, config_file: str | None, namespace: str | None, overrides: Sequence[str]
) -> ExportSource:
    """Return what a graph and its configuration describe; raises a UserError as ``serve`` would."""
    from dynaplan.config.frontend import frontends_for
    from dynaplan.graph.config import (
        find_config_file,
        read_config,
        resolve_graph,
        unused_common_overrides,
        validate_config,
        with_frontend_count,
    )
    from dynaplan.graph.loading import load_graph

    directory = (Path(graph) if Path(graph).is_dir() else Path.cwd()).resolve()
    loaded = load_graph(graph, directory)
    path = find_config_file(config_file, directory, loaded) if config_file else None
    config = read_config(path, overrides)
    if config.get(MODELS):
        raise refuse_on_request()
    warnings = validate_config(loaded, config) + unused_common_overrides(config, overrides)
    # ``workers: auto`` goes by the GPUs that the workers have at the start: a cluster's are not known.
    sized = resolve_graph(loaded, with_frontend_count(loaded, config, lambda: 1), namespace)
    gpus = math.ceil(sum(service.workers * service.gpus for service in sized.services))
    config = with_frontend_count(loaded, config, lambda: frontends_for(gpus))
    spec = resolve_graph(loaded, config, namespace)
    counts = {service.role: service.workers for service in spec.services}
    startup_s = _startup_s(spec, config)
    return ExportSource(spec, config, counts, startup_s=startup_s, warnings=tuple(warnings))


def running_source(namespace: str | None, overrides: Sequence[str]) -> ExportSource:
    """Return the deployment that runs here, with as many workers as it has now; raises a UserError."""
    from dynaplan.fleet.deployments import find_deployment
    from dynaplan.fleet.launch import read_launch

    found = find_deployment(namespace)
    try:
        launch = read_launch(found.runtime_dir)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the launch file of {found.namespace} cannot be read: {error}",
            hint="Name the graph and its file: `dynaplan export kubernetes GRAPH -f FILE`.",
        ) from error
    if launch.graph.on_demand:
        raise refuse_on_request()
    config = merge_sections(launch.config, parse_overrides(overrides))
    return ExportSource(
        launch.graph,
        config,
        running_counts(launch.graph, found.workers),
        found.environment().get(TOKEN_VARIABLE, ""),
        _startup_s(launch.graph, config),
        found.log_dir,
    )


def running_counts(graph: GraphSpec, workers: Iterable[Worker]) -> dict[Role, int]:
    """Return the number of workers of each role: present ones, without draining ones, of the scaled roles.

    Of every other role it is the number in the configuration.
    """
    present = Counter(worker.role for worker in workers if worker.state in COUNTS)
    return {
        service.role: present[service.role] if service.role in SCALED_ROLES else service.workers
        for service in graph.services
    }


def _startup_s(spec: GraphSpec, config: Sections) -> float | None:
    times = StartupTimesFile.beside(statefile_path(os.environ, spec.namespace)).read()
    found = []
    for service in spec.services:
        gpus, share = tuple(range(math.ceil(service.gpus))), min(1.0, service.gpus)
        worker = Worker(service.name, service.name, service.role, gpus=gpus, gpu_share=share)
        found.append(median_startup_s(times, startup_key(worker, section_options(config, service.name))))
    return max((usual for usual in found if usual is not None), default=None)
