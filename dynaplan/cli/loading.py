"""From what a user names to a deployment whose every value is valid: graph, file and options, checked.

All that is wrong is told at once. A section with an error is left out of the later checks, which would only
repeat it in other words.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dynaplan.cli.imported_models import read_config_file
from dynaplan.cli.serve_checks import check_settings, locate_models
from dynaplan.cli.service_options import graph_of_models, model_hint
from dynaplan.config.frontend import frontends_for
from dynaplan.config.model_entries import (
    components_of,
    planned_models,
    prefill_components_of,
    with_worker_sections,
)
from dynaplan.config.overrides import MODELS, Sections
from dynaplan.graph.config import (
    check_sections,
    find_config_file,
    resolve_graph,
    unused_common_overrides,
    with_frontend_count,
)
from dynaplan.graph.loading import Graph, load_graph
from dynaplan.graph.model import GraphSpec, section_name
from dynaplan.util.errors import Faults, GraphError, all_faults, nearest


def load_deployment(
    graph: str,
    config_file: str | None,
    directory: Path,
    namespace: str | None,
    overrides: Sequence[str],
    count_gpus: Callable[[], int],
    service_name: str = "",
) -> tuple[Graph, Sections, GraphSpec, list[str]]:
    """Return the graph, its configuration, its services with their settings, and warnings.

    ``count_gpus`` counts the GPUs of the deployment, for ``workers: auto``. With ``service_name`` that one
    service is left. Raises a UserError with all that ``serve`` refuses before it starts anything, but for
    models that have too little memory.
    """
    loaded = _named_graph(graph, directory)
    cores = len(os.sched_getaffinity(0))
    with all_faults() as faults:
        file = find_config(config_file, directory, loaded)
        read, notes = read_config_file(file, overrides, directory, faults)
        config = with_worker_sections(read)
        loaded = _with_models(loaded, config)
        warnings = notes + check_sections(loaded, config, faults)
        warnings += unused_common_overrides(config, overrides)
        config = locate_models(loaded, _sound(loaded, config, faults), directory)
        config = with_frontend_count(loaded, config, lambda: frontends_for(count_gpus(), cores))
        spec = resolve_graph(loaded, config, namespace)
        spec = only_service(spec, service_name) if service_name else spec
        warnings += check_settings(loaded, spec, config, faults)
    return loaded, config, spec, warnings


def _named_graph(graph: str, directory: Path) -> Graph:
    try:
        return load_graph(graph, directory)
    except GraphError as error:
        if hint := model_hint(graph):
            error.hint = f"{error.hint}\n  {hint}"
        raise


def _with_models(graph: Graph, config: Mapping[str, Mapping[str, Any]]) -> Graph:
    """Return the graph with the services of the section ``Models``, planned or not."""
    planned, models = planned_models(config), config.get(MODELS) or {}
    chosen = graph_of_models(graph.identifier, bool(planned))
    if graph.identifier != chosen:
        graph = load_graph(chosen, graph.working_dir)
    return graph.with_models(components_of(models), planned, prefill_components_of(models))


def _sound(graph: Graph, config: Sections, faults: Faults) -> Sections:
    """Return the sections in which ``faults`` has found no error."""
    places = {each.name: section_name(each) for each in graph.services()}
    return {name: each for name, each in config.items() if places.get(name, name) not in faults.places}


def find_config(name: str | None, directory: Path, graph: Graph) -> Path | None:
    """Return the file of ``-f NAME``, which the working directory or the graph's module has; None without."""
    if name and (directory / name).is_dir():  # of models
        return directory / name
    return find_config_file(name, directory, graph) if name else None


def only_service(spec: GraphSpec, name: str) -> GraphSpec:
    service = spec.service(name)
    if service is None:
        names = [each.name for each in spec.services]
        raise GraphError(f"--service-name {name}: the graph has no such service", hint=nearest(name, names))
    if service.in_process_of:
        raise GraphError(
            f"--service-name {name}: it runs inside {service.in_process_of}'s process",
            hint=f"Use --service-name {service.in_process_of}.",
        )
    return replace(spec, services=(service,))
