"""Finds the running deployment, or its store, for every command but ``serve``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dynaplan.config.overrides import MODELS
from dynaplan.config.service_config import CONFIG_VARIABLE, ServiceConfig
from dynaplan.config.settings.servers import (
    PATHS,
    has_store_address,
    store_backend,
)
from dynaplan.planner.recorders.decision_log import recent_records
from dynaplan.planner.recorders.manual_changes import manual_changes
from dynaplan.util.errors import ConfigError, DeploymentError

if TYPE_CHECKING:
    from dynaplan.contract.gpu_standing import GpuStandings
    from dynaplan.contract.gpus import Gpu
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.planner.recorders.manual_changes import ManualChange


def make_paths_absolute() -> None:
    """Make the paths in the environment absolute, before a command changes its directory."""
    for name in PATHS:
        if path := os.environ.get(name):
            os.environ[name] = os.path.abspath(os.path.expanduser(path))


@contextmanager
def connected(found: RunningDeployment) -> Iterator[None]:
    """Put the deployment's addresses and tokens into this process's environment, inside a ``with`` block."""
    before = dict(os.environ)
    os.environ.update(found.environment())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def connect(namespace: str | None) -> RunningDeployment:
    """Return the running deployment, after putting its addresses and tokens into this process's environment.

    Raises DeploymentError when no deployment runs, or several run and none is named.
    """
    from dynaplan.fleet.deployments import find_deployment

    found = find_deployment(namespace)
    os.environ.update(found.environment())
    return found


def serve_pid(found: RunningDeployment) -> int:
    """Return the pid of ``serve``: another when its supervisor (the statefile's arbiter) started it again."""
    from dynaplan.process.heartbeats import SERVE_HEARTBEAT, HeartbeatFiles

    beat = HeartbeatFiles.of(found.runtime_dir).read(SERVE_HEARTBEAT)
    return beat.process.pid if beat else found.arbiter.pid


def service_config(found: RunningDeployment) -> ServiceConfig:
    """Return the merged configuration that ``serve`` gave its services, as the statefile has it."""
    return ServiceConfig.from_text(found.document["environment"].get(CONFIG_VARIABLE, ""))


def refuse_on_demand(found: RunningDeployment) -> None:
    """Raise DeploymentError where models are loaded on request: requests decide on their workers."""
    from dynaplan.config.model_entries import served_models

    if served_models(service_config(found)):
        raise DeploymentError(
            f"the models of {found.namespace} are loaded on request: requests decide on their workers",
            hint="`dynaplan load`, `unload`, `pin` and `unpin` move them; `dynaplan models` shows them.",
        )


def planner_components(found: RunningDeployment) -> dict[str, str]:
    """Return the component of each model that has a planner of its own, keyed by model.

    If no model has one, the only planner is that of the graph: its model and component are "".
    """
    from dynaplan.config.model_entries import components_of, planned_models

    config = service_config(found)
    components = components_of(config.get(MODELS) or {})
    return {name: components[name] for name in planned_models(config)} or {"": ""}


def decisions_of(found: RunningDeployment, last: int, component: str = "") -> list[dict[str, Any]]:
    """Return the last records of this deployment's planner, oldest first; none of an earlier deployment.

    ``component`` is that of the model whose planner it is, where models have planners of their own.
    """
    return recent_records(found.log_dir / "planner" / component, last, since_s=found.began_s)


def manual_changes_of(found: RunningDeployment, last: int) -> list[ManualChange]:
    """Return the last changes that persons have made to this deployment, oldest first."""
    return manual_changes(found.log_dir, last, found.began_s)


def gpus_of(found: RunningDeployment) -> tuple[Gpu, ...]:
    """Return the deployment's GPUs; none where its workers have none, and only cores compute."""
    from dynaplan.fleet.gpu_inventory import shown_gpus

    return shown_gpus(found.document, service_config(found))


def standings_of(found: RunningDeployment) -> GpuStandings:
    """Return how the deployment's GPUs stand that are or were ill, as the statefile has it."""
    from dynaplan.contract.gpu_standing import SET_APART, GpuStandings
    from dynaplan.fleet.rules.statefile import planner_keys_of

    try:
        return GpuStandings.from_text(planner_keys_of(found.document).get(SET_APART, ""))
    except ValueError:
        return GpuStandings()


def find_store(namespace: str | None) -> RunningDeployment | None:
    """Return the running deployment, and set the environment to its store and servers.

    Returns None, and changes nothing, if the environment has the address of a store, or if ``--store`` is
    given and no deployment runs. Raises ConfigError when ``--store`` is another store than the deployment's,
    otherwise as ``connect``.
    """
    asked = store_backend(os.environ)
    source = click.get_current_context().get_parameter_source("store")
    is_asked = source is ParameterSource.COMMANDLINE
    if has_store_address(os.environ) or (is_asked and not _is_any_running(namespace)):
        return None
    found = connect(namespace)
    if is_asked and store_backend(os.environ) != asked:
        raise ConfigError(
            f"--store {asked}: {found.namespace}, which runs here, uses {store_backend(os.environ)}",
            hint="Leave --store out.",
        )
    return found


def _is_any_running(namespace: str | None) -> bool:
    from dynaplan.fleet.deployments import find_deployments

    try:
        return bool(find_deployments(namespace))
    except DeploymentError:
        return False
