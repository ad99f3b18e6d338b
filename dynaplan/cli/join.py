"""Joining a namespace: its store, its token, and the configuration of a ``serve`` that runs there."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from dynaplan.cli.running_deployment import find_store, serve_pid
from dynaplan.cli.timing import JOIN_STORE_TIMEOUT_S, TOKEN_CHECK_TIMEOUT_S
from dynaplan.config import certificates
from dynaplan.config.overrides import Sections
from dynaplan.config.settings.servers import CA_VARIABLE, PLACES, TOKEN_VARIABLE, store_backend
from dynaplan.fleet.deployments import RunningDeployment, find_deployment
from dynaplan.fleet.launch import LAUNCH_FILE, Launch
from dynaplan.fleet.runtime_dir import ensure_token, new_token, read_token
from dynaplan.fleet.statefile_store import statefile_path
from dynaplan.graph.config import DEFAULT_NAMESPACE
from dynaplan.http.client import HttpClient
from dynaplan.process import process_table
from dynaplan.store import connections
from dynaplan.store.instances import SERVICES_PREFIX, Instance
from dynaplan.util.errors import ConfigError, DeploymentError, PermanentError, TemporaryError
from dynaplan.util.masking import mask_secrets
from dynaplan.worker.lifecycle import WHO_PATH

SERVE_VARIABLES = ("DYNAPLAN_RUNTIME_DIR", "DYNAPLAN_LOG_DIR", "DYNAPLAN_PARENT_PID", "DYNAPLAN_WORKER_NAME")
"""Variables that a component must not have: they are for the processes that ``serve`` starts."""


@dataclass(frozen=True)
class JoinedNamespace:
    """A namespace that a component joins.

    ``deployment`` is the ``serve`` that owns the namespace on this host, ``config`` its configuration with
    its secrets; None and empty without a local ``serve``. ``instances`` are the present registrations.
    """

    namespace: str
    deployment: RunningDeployment | None = None
    config: Sections = field(default_factory=dict, repr=False)
    instances: tuple[Instance, ...] = ()

    @property
    def where(self) -> str:
        """The joined deployment, or the namespace and its store, in words."""
        if self.deployment:
            return f"deployment {self.namespace} (serve runs as pid {serve_pid(self.deployment)})"
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
    """Return the configuration that ``serve`` gave its services, with secrets; empty if it is unreadable."""
    try:
        return Launch.from_json((deployment.runtime_dir / LAUNCH_FILE).read_text()).config
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _token(namespace: str, file: Path | None, of_deployment: str) -> str:
    """Return the namespace's token: of the file, the deployment or the environment, or the one kept here.

    Keeps the deployment's token beside the statefile, or a new one where there is none at all. Raises
    ConfigError when the file's token is not the deployment's.
    """

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
    kept = ensure_token(statefile_path(os.environ, namespace), lambda: token or new_token())
    return token or kept


async def _registered(namespace: str, token: str) -> tuple[Instance, ...]:
    """Return the registrations; UserError when the store is silent, or a component refuses the token."""
    try:
        async with connections.open_store() as store, asyncio.timeout(JOIN_STORE_TIMEOUT_S):
            items = await store.list(f"{SERVICES_PREFIX}{namespace}/")
    except (TemporaryError, PermanentError, TimeoutError) as error:
        raise DeploymentError(
            f"the store does not answer: {error or 'no answer in time'}",
            hint="Start it, or correct its address; `dynaplan serve GRAPH` brings one along.",
        ) from error
    instances = tuple(_readable(item.value for item in items))
    network = process_table.network()
    urls = {each.url: each.worker for each in instances if each.url and each.is_reachable_from(network)}
    async with HttpClient(token, certificates.authorities(os.environ)) as http:
        refusals = await asyncio.gather(*(_is_refused(http, url, worker) for url, worker in urls.items()))
    for worker in (worker for worker, refused in zip(urls.values(), refusals, strict=True) if refused):
        raise ConfigError(
            f"the token is not that of namespace {namespace}: {worker} refuses it",
            hint="Every component of a namespace has the same: name its file with --token-file.",
        )
    return instances


async def _is_refused(http: HttpClient, url: str, worker: str) -> bool:
    """Return whether the component at ``url`` refuses the client's token; False when it does not answer.

    Raises ConfigError when its certificate cannot be verified.
    """
    try:
        answer = await http.request("GET", url + WHO_PATH, timeout_s=TOKEN_CHECK_TIMEOUT_S)
    except OSError as error:
        if isinstance(error.__cause__, ssl.SSLCertVerificationError):
            raise ConfigError(
                f"the certificate of {worker} at {url} cannot be believed: {error}",
                hint="Name the authority that vouches for the components' certificates: --tls-ca FILE.",
            ) from error
        return False
    return answer.status == 401


def _readable(values: Iterable[str]) -> Iterable[Instance]:
    for value in values:
        try:
            yield Instance.from_json(value)
        except ValueError:
            continue
