"""One stock service alone: it is checked, claims its GPUs, and runs in the foreground."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from dynaplan.cli.join import JoinedNamespace
from dynaplan.cli.loading import only_service
from dynaplan.cli.serve import warn
from dynaplan.cli.serve_checks import check_memory, check_settings, locate_models
from dynaplan.config import certificates
from dynaplan.config.overrides import Sections, merge_sections
from dynaplan.config.service_config import COMMON, CONFIG_VARIABLE, SERVICE_ARGS, section_options
from dynaplan.config.settings.servers import HOST_VARIABLE, TOKEN_VARIABLE
from dynaplan.config.settings.worker import SIMULATED, ModelSettings, engine_of
from dynaplan.fleet.deployments import port_holder
from dynaplan.fleet.gpu_claims import Claims, NodeClaims
from dynaplan.fleet.gpu_devices import available_gpus
from dynaplan.fleet.preparation import first_workers
from dynaplan.fleet.rules.allocation import worker_environment
from dynaplan.fleet.runtime_dir import hold_port
from dynaplan.graph.config import (
    check_sections,
    find_config_file,
    read_config,
    resolve_graph,
    with_frontend_count,
)
from dynaplan.graph.lifecycle import Worker
from dynaplan.graph.loading import load_graph, shipped_graphs
from dynaplan.graph.model import GraphSpec
from dynaplan.process import process_table
from dynaplan.util.descriptors import raise_descriptor_limit
from dynaplan.util.errors import ConfigError, all_faults
from dynaplan.util.sockets import bound_socket
from dynaplan.worker.main import Standalone, main
from dynaplan.worker.server import Address, bind_advertised

GRAPH = "dynaplan.components:Frontend"
"""The stock services, linked without a planner."""


@dataclass(frozen=True)
class ComponentSockets:
    """The sockets of a component: of its own server, and of the public port with the host of ``--host``.

    ``own`` is None on loopback; ``public`` is None without a public port.
    """

    own: Address | None = None
    public: socket.socket | None = None
    host: str = ""


@dataclass(frozen=True)
class Component:
    """One service that is to run here: its graph of one service, and the configuration of all of them."""

    spec: GraphSpec
    config: Sections
    name: str

    @property
    def worker_name(self) -> str:
        """The name that the process registers: of the namespace, the service, this host and the process."""
        host = re.sub(r"[^A-Za-z0-9-]+", "-", os.uname().nodename)
        return f"{self.spec.namespace}_{self.name}_{host}_{os.getpid()}"


def advertised_address(host: str | None, port: int, token_file: Path | None) -> Address | None:
    """Return the address for other hosts, None for loopback; UserError without token or certificate."""
    address = bind_advertised(host, has_token=bool(token_file or os.environ.get(TOKEN_VARIABLE)), port=port)
    certificates.check(os.environ, address.host if address else "")
    return address


def config_for(file: str | None, overrides: Sequence[str], joined: JoinedNamespace) -> Sections:
    """Return the configuration: of the deployment, over it the file's, over it ``--Service.key=value``."""
    path = find_config_file(file, Path.cwd(), beside=shipped_graphs()) if file else None
    return merge_sections(joined.config, read_config(path, overrides))


def check_component(name: str, config: Sections, section: Mapping[str, Any], namespace: str) -> Component:
    """Return the service, once its options are checked as its own process would; raises a UserError.

    ``section`` are the flags, which override everything in ``config``. Sections of services that are none of
    the stock ones are left out.
    """
    graph = load_graph(GRAPH, Path.cwd())
    merged = merge_sections(config, {name: dict(section)})
    merged[name] = _one_process(merged[name])
    known = {COMMON, *(service.name for service in graph.services())}
    merged = {key: value for key, value in merged.items() if key in known}
    with all_faults() as faults:
        warnings = check_sections(graph, merged, faults)
        merged = with_frontend_count(graph, locate_models(graph, merged, Path.cwd()), lambda: 1)
        spec = only_service(resolve_graph(graph, merged, namespace), name)
        warnings += check_settings(graph, spec, merged, faults)
    warn([each for each in warnings if each.startswith(name)])
    return Component(spec, merged, name)


def refuse_another_model(component: Component, joined: JoinedNamespace) -> None:
    """Raise ConfigError when the registered workers of this service serve another model."""
    options = section_options(component.config, component.name)
    usual = ModelSettings.model if engine_of(options) == SIMULATED else ""
    names = {str(options.get("served-model-name") or ""), str(options.get("model") or usual)} - {""}
    for each in joined.instances:
        model = each.card.get("model")
        if each.component == component.name and model and names and model not in names:
            raise ConfigError(
                f"{each.worker} of namespace {joined.namespace} serves {model}, and not {max(names)}",
                hint="Frontends send a request to any worker of a namespace: choose another --namespace.",
            )


def run(
    component: Component, joined: JoinedNamespace, place: ComponentSockets, *, uses_busy_gpus: bool = False
) -> int:
    """Claim the component's GPUs and run it in the foreground; return the exit code."""

    raise_descriptor_limit()
    with ExitStack() as stack:
        own_process = process_table.identity_of(os.getpid())
        name = component.worker_name
        claims = NodeClaims(own_process, component.spec.namespace, worker=name)
        worker = replace(_with_gpus(component, claims, uses_busy_gpus, stack), name=name)
        service = component.spec.services[0]
        inventory, _ = available_gpus(None)
        os.environ.update(worker_environment(worker, inventory, service.envs))
        os.environ[CONFIG_VARIABLE] = json.dumps(component.config)
        if place.public:
            os.environ.update(DYNAMO_HOST=place.host, DYNAMO_PORT=str(place.public.getsockname()[1]))
        gpus = f" on GPU {', '.join(map(str, worker.gpus))}" if worker.gpus else ""
        click.echo(f"{worker.name}{gpus} joins {joined.where}. Ctrl-C drains it; twice ends it at once.")
        sys.stdout.flush()
        own, advertised = (place.own.socket, place.own.host) if place.own else (None, "")
        os.environ[HOST_VARIABLE] = advertised
        alone = Standalone(place.public, worker.gpus, own, advertised, partial(claims.held_by_others, ()))
        return main((GRAPH, "--service-name", component.name), alone)


def _with_gpus(component: Component, claims: Claims, uses_busy_gpus: bool, stack: ExitStack) -> Worker:
    """Claim GPUs for this process until ``stack`` closes; warn about memory, and return it as a worker."""
    inventory, is_simulated = available_gpus(None)
    _, warnings = check_memory(component.spec, component.config, inventory, is_simulated)
    warn(warnings)
    (worker,), _ = first_workers(component.spec, inventory, lambda: claims, stack, uses_busy_gpus)
    return worker


def _one_process(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of one process: a deployment's number of workers is not its own."""
    arguments = section.get(SERVICE_ARGS)
    if not isinstance(arguments, Mapping):
        return dict(section)
    return {**section, SERVICE_ARGS: {key: arguments[key] for key in arguments if key != "workers"}}


def held_port(host: str, port: int, is_shared: bool) -> socket.socket:
    """Return a socket that is bound to the public port; ConfigError when it is taken.

    ``is_shared``: frontends of this user may have it already, when they share it as well. It may be bound
    again at once when the process has ended, whatever connections it had.
    """
    return hold_port(host, port, port_holder, partial(bound_socket, is_shared=is_shared))
