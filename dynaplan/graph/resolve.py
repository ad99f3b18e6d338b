"""Turn a graph and its configuration into the services that the supervisor starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dynaplan.config.overrides import deep_merge
from dynaplan.config.parallelism import gpus_needed, tensor_parallel_size
from dynaplan.config.service_config import SERVICE_ARGS, section_options
from dynaplan.config.settings.fields import options_of
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.config.settings.service_args import Resources, ServiceArgs
from dynaplan.graph.graph import Graph
from dynaplan.graph.lifecycle import Role
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.graph.service import Service
from dynaplan.util.errors import ConfigError, GraphError

DEFAULT_NAMESPACE = PlannerSettings.namespace
NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
"""The form of a namespace, which becomes part of file names, queue names and keys."""


def resolve_graph(
    graph: Graph, config: Mapping[str, Mapping[str, Any]], namespace: str | None = None
) -> GraphSpec:
    """Return the services to run, the entry first, with workers, GPUs and environment.

    The namespace is the given one, else the one that the services' decorators agree on, else ``dynamo``.
    Raises ConfigError or GraphError when the graph cannot be started like this.
    """
    services = graph.services()
    names = {service.name for service in services}
    for service in services:
        if service.in_process_of and service.in_process_of not in names:
            raise GraphError(
                f"{service.name} runs in the process of {service.in_process_of}, which this graph lacks",
                hint=f"Link {service.in_process_of} into {graph.identifier}.",
            )
    planners = [service.name for service in services if service.role is Role.PLANNER]
    if len(planners) > 1:
        raise GraphError(
            f"More than one planner found in the pipeline: {', '.join(planners)}", hint="Link one."
        )
    return GraphSpec(
        identifier=graph.identifier,
        working_dir=str(graph.working_dir),
        namespace=_namespace(services, namespace),
        services=tuple(_spec(service, config) for service in services),
    )


def _namespace(services: list[Service[Any]], chosen: str | None) -> str:
    declared = sorted({service.config.namespace for service in services} - {""})
    if not chosen and len(declared) > 1:
        raise GraphError(
            f"All components must have the same namespace, got {set(declared)}",
            hint="Give them one namespace in @service(dynamo=...), or use --namespace.",
        )
    namespace = chosen or next(iter(declared), DEFAULT_NAMESPACE)
    if not NAMESPACE.fullmatch(namespace):
        raise ConfigError(
            f"namespace {namespace!r}: not a usable name",
            hint="Expected letters, digits, '-' and '_', beginning with a letter or digit, 63 at most.",
        )
    return namespace


def _spec(service: Service[Any], config: Mapping[str, Mapping[str, Any]]) -> ServiceSpec:
    if service.in_process_of:
        return ServiceSpec(service.name, service.role, in_process_of=service.in_process_of)
    written = _without_nulls(config.get(service.name, {}).get(SERVICE_ARGS))
    arguments = deep_merge(
        {
            "workers": service.config.workers,
            "resources": service.config.resources,
            "envs": service.config.envs,
        },
        written,
    )
    where = f"{service.name}.{SERVICE_ARGS}"
    return ServiceSpec(
        name=service.name,
        role=service.role,
        workers=_workers(f"{where}.workers", arguments["workers"]),
        gpus=_gpus_of(service, config, arguments["resources"], "gpu" in written.get("resources", {})),
        envs={name: str(value) for name, value in arguments["envs"].items()},
        public_endpoints=tuple(each.name for each in service.endpoints.values() if each.is_public),
    )


def _without_nulls(mapping: Mapping[str, Any] | None) -> dict[str, Any]:
    """Drop the keys that are written without a value: they mean the same as keys that are not written."""
    return {key: value for key, value in (mapping or {}).items() if value is not None}


def _workers(where: str, value: Any) -> int:
    read = options_of(ServiceArgs)["workers"].read(value, is_text=isinstance(value, str))
    if read is None:
        raise ConfigError(f"{where} = {value!r}: expected a whole number of at least 1")
    return int(read)


def _gpus_of(
    service: Service[Any],
    config: Mapping[str, Mapping[str, Any]],
    resources: Mapping[str, Any],
    is_written: bool,
) -> float:
    """Return the number of GPUs of one worker: as written, else enough for the engine's parallel ranks.

    Raises ConfigError when a written number does not fit those ranks; 0 (no GPU) fits any engine.
    """
    gpus = _gpus(f"{service.name}.{SERVICE_ARGS}.resources.gpu", resources.get("gpu"))
    options = _engine_options(service, config)
    if options is None:
        return gpus
    try:
        if not is_written:
            return gpus_needed(options, gpus)
        tensor_parallel_size(options, gpus)
    except ConfigError as error:
        raise ConfigError(f"{service.name}: {error.args[0]}", hint=error.hint) from error
    return gpus


def _gpus(where: str, value: Any) -> float:
    gpus = options_of(Resources)["gpu"].read(Resources.gpu if value is None else value, is_text=True)
    if gpus is None:
        raise ConfigError(f"{where} = {value!r}: expected a number of GPUs, 0 or more")
    if gpus > 1 and gpus != int(gpus):
        raise ConfigError(
            f"{where} = {value!r}: Float GPUs larger than 1 is not supported",
            hint="Expected a whole number, or a fraction below 1 for workers that share a GPU.",
        )
    return int(gpus) if gpus == int(gpus) else gpus


def _engine_options(
    service: Service[Any], config: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """Return the options of a service that is an engine's worker; None for any other service."""
    if service.options is None or "tensor-parallel-size" not in service.options:
        return None
    return section_options(config, service.name)
