"""One stock service alone: it joins a namespace, is checked, claims its GPUs, and runs in the foreground.

Joining finds the namespace's store, its token, and the configuration of a ``serve`` that runs there.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import click

from dynaplan.cli.deployment import find_store
from dynaplan.cli.serve import only_service, warn
from dynaplan.cli.serve_checks import check_memory, check_settings, locate_models
from dynaplan.cli.timing import JOIN_STORE_TIMEOUT_S, TOKEN_CHECK_TIMEOUT_S
from dynaplan.config import certificates
from dynaplan.config.overrides import Sections, merge_sections
from dynaplan.config.service_config import COMMON, CONFIG_VARIABLE, SERVICE_ARGS, section_options
from dynaplan.config.settings.events import HOST_VARIABLE
from dynaplan.config.settings.servers import PLACES, store_backend
from dynaplan.config.settings.tls import CA_VARIABLE
from dynaplan.config.settings.worker import SIMULATED, ModelSettings, engine_of
from dynaplan.fleet import local_host
from dynaplan.fleet.deployments import RunningDeployment, find_deployment, port_holder
from dynaplan.fleet.launch import LAUNCH_FILE, Launch
from dynaplan.fleet.ports import Claims
from dynaplan.fleet.preparation import first_workers
from dynaplan.fleet.rules.allocation import worker_environment
from dynaplan.fleet.runtime_dir import hold_port, lasting_token, new_token, read_token
from dynaplan.graph.config import find_config_file, read_config
from dynaplan.graph.graph import load_graph
from dynaplan.graph.importing import shipped_graphs
from dynaplan.graph.lifecycle import Worker
from dynaplan.graph.model import GraphSpec
from dynaplan.graph.resolve import DEFAULT_NAMESPACE, resolve_graph
from dynaplan.graph.validation import validate_config
from dynaplan.process import process_table
from dynaplan.store import connections
from dynaplan.store.instances import SERVICES_PREFIX, Instance
from dynaplan.util.descriptors import raise_descriptor_limit
from dynaplan.util.errors import ConfigError, DeploymentError, PermanentError, TemporaryError
from dynaplan.util.masking import mask_secrets
from dynaplan.util.sockets import bound_socket
from dynaplan.worker.client import worker_session
from dynaplan.worker.http_server.reaching import Address, reachable
from dynaplan.worker.life import WHO_PATH

TOKEN_VARIABLE = "DYNAPLAN_WORKER_TOKEN"

SERVE_VARIABLES = ("DYNAPLAN_RUNTIME_DIR", "DYNAPLAN_LOG_DIR", "DYNAPLAN_PARENT_PID", "DYNAPLAN_WORKER_NAME")
"""Variables that a component must not have: they are for the processes that ``serve`` starts."""


@dataclass(frozen=True)
class JoinedNamespace:
    """A namespace that a component joins.

    ``deployment`` is the ``serve`` that owns the namespace on this host, ``config`` its configuration with
    its secrets; None and empty without one. ``instances`` are the registrations, as they are now.
    """

    namespace: str
    deployment: RunningDeployment | None = None
    config: Sections = field(default_factory=dict, repr=False)
    instances: tuple[Instance, ...] = ()

    @property
    def where(self) -> str:
        """The place that was joined, in words."""
        if self.deployment:
            return f"deployment {self.namespace} (serve runs as pid {self.deployment.arbiter.pid})"
        backend = store_backend(os.environ)
        place = mask_secrets(os.environ.get(PLACES[backend], "")) or "its usual place"
        return f"namespace {self.namespace} in the store {backend} at {place}"


def join(namespace: str | None, token_file: Path | None) -> JoinedNamespace:
    """Find the namespace and put its addresses and its token into this process's environment.

    The store that the environment names comes first, then the ``serve`` of this user that runs here, then the
    store that ``--store`` names at its usual place. Raises a UserError when there is none, when the store
    does not answer, or when a component that is registered there has another token.
    """
    try:
        deployment = find_store(namespace) or _deployment_beside(namespace)
    except DeploymentError as error:
        ways = "On one host --store file needs no server; ETCD_ENDPOINTS names an etcd."
        raise DeploymentError(str(error.args[0]), hint=f"{error.hint}\n  {ways}") from None
    namespace = deployment.namespace if deployment else namespace or DEFAULT_NAMESPACE
    environment = deployment.environment() if deployment else {}
    environment |= {name: os.environ[name] for name in (CA_VARIABLE,) if os.environ.get(name)}
    token = _token(namespace, token_file, environment.get(TOKEN_VARIABLE, ""))
    os.environ.update({**environment, TOKEN_VARIABLE: token, "DYN_NAMESPACE": namespace})
    for name in SERVE_VARIABLES:
        os.environ.pop(name, None)
    instances = asyncio.run(_registered(namespace, token))
    config = _config_of(deployment) if deployment else {}
    return JoinedNamespace(namespace, deployment, config, instances)


def _deployment_beside(namespace: str | None) -> RunningDeployment | None:
    """Return the deployment that runs here in the store that the environment names, if there is one."""
    try:
        found = find_deployment(namespace)
        place = PLACES[store_backend(os.environ)]
        return found if found.environment().get(place) == os.environ.get(place, "") else None
    except DeploymentError:
        return None


def _config_of(deployment: RunningDeployment) -> Sections:
    """Return the configuration that ``serve`` gave its services, secrets included; empty without its file."""
    try:
        return Launch.from_json((deployment.runtime_dir / LAUNCH_FILE).read_text()).config
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _token(namespace: str, file: Path | None, of_deployment: str) -> str:
    """Return the namespace's token: of the file, the deployment or the environment, or the one kept here."""
    named = read_token(file) if file else ""
    if named and of_deployment and named != of_deployment:
        raise ConfigError(
            f"the token in {file} is not that of deployment {namespace}",
            hint="Leave --token-file out: on this host it is not needed.",
        )
    token = named or of_deployment or os.environ.get(TOKEN_VARIABLE, "")
    if named or (token and not of_deployment):
        return token
    # A deployment's is kept too: the next `serve` takes it, and so do those who go on without this one.
    kept = lasting_token(local_host.statefile_path(namespace), lambda: token or new_token())
    return token or kept


async def _registered(namespace: str, token: str) -> tuple[Instance, ...]:
    """Return the registrations; UserError when the store is silent, or a component refuses the token."""
    store = connections.connect_store()
    try:
        async with asyncio.timeout(JOIN_STORE_TIMEOUT_S):
            items = await store.list(f"{SERVICES_PREFIX}{namespace}/")
    except (TemporaryError, PermanentError, TimeoutError) as error:
        raise DeploymentError(
            f"the store does not answer: {error or 'no answer in time'}",
            hint="Start it, or correct its address; `dynaplan serve GRAPH` brings one along.",
        ) from error
    finally:
        await store.close()
    instances = tuple(_readable(item.value for item in items))
    network = process_table.network()
    urls = {each.url: each.worker for each in instances if each.url and each.is_within_reach(network)}
    async with worker_session(token, certificates.authorities(os.environ)) as session:
        refusals = await asyncio.gather(*(_is_refused(session, url, worker) for url, worker in urls.items()))
    for worker in (worker for worker, refused in zip(urls.values(), refusals, strict=True) if refused):
        raise ConfigError(
            f"the token is not that of namespace {namespace}: {worker} refuses it",
            hint="Every component of a namespace has the same: name its file with --token-file.",
        )
    return instances


async def _is_refused(session: aiohttp.ClientSession, url: str, worker: str) -> bool:
    """Return whether the component there refuses the session's token; a silent one does not.

    Raises ConfigError for one whose certificate cannot be believed.
    """
    try:
        async with asyncio.timeout(TOKEN_CHECK_TIMEOUT_S), session.get(url + WHO_PATH) as response:
            return response.status == 401
    except aiohttp.ClientConnectorCertificateError as error:
        reason = getattr(error.certificate_error, "verify_message", "") or str(error)
        raise ConfigError(
            f"the certificate of {worker} at {url} cannot be believed: {reason}",
            hint="Name the authority that vouches for the components' certificates: --tls-ca FILE.",
        ) from error
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


def _readable(values: Iterable[str]) -> Iterable[Instance]:
    for value in values:
        try:
            yield Instance.from_json(value)
        except ValueError:
            continue


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
    address = reachable(host, has_token=bool(token_file or os.environ.get(TOKEN_VARIABLE)), port=port)
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
    warnings = validate_config(graph, merged)
    merged = locate_models(graph, merged, Path.cwd())
    spec = only_service(resolve_graph(graph, merged, namespace), name)
    warnings += check_settings(graph, spec, merged)
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
    from dynaplan.worker.main import Alone, main

    raise_descriptor_limit()
    with ExitStack() as stack:
        own_process = process_table.identity_of(os.getpid())
        name = component.worker_name
        claims = local_host.gpu_claims(own_process, component.spec.namespace, name)
        worker = replace(_with_gpus(component, claims, uses_busy_gpus, stack), name=name)
        service = component.spec.services[0]
        inventory, _ = local_host.gpu_inventory(None)
        os.environ.update(worker_environment(worker, inventory, service.envs))
        os.environ[CONFIG_VARIABLE] = json.dumps(component.config)
        if place.public:
            os.environ.update(DYNAMO_HOST=place.host, DYNAMO_PORT=str(place.public.getsockname()[1]))
        gpus = f" on GPU {', '.join(map(str, worker.gpus))}" if worker.gpus else ""
        click.echo(f"{worker.name}{gpus} joins {joined.where}. Ctrl-C drains it; twice ends it at once.")
        sys.stdout.flush()
        own, advertised = (place.own.socket, place.own.host) if place.own else (None, "")
        os.environ[HOST_VARIABLE] = advertised
        alone = Alone(place.public, worker.gpus, own, advertised, partial(claims.foreign, ()))
        return main((GRAPH, "--service-name", component.name), alone)


def _with_gpus(component: Component, claims: Claims, uses_busy_gpus: bool, stack: ExitStack) -> Worker:
    """Return this process as a worker with its GPUs, which are its own until ``stack`` ends."""
    inventory, is_simulated = local_host.gpu_inventory(None)
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
