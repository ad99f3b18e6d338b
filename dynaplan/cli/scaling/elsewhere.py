"""``dynaplan scale`` where no ``serve`` of this host scales: one of another host, or a planner of a cluster.

The first is reached through its store alone. Numbers for a cluster are written where its planner keeps its
decisions, and the planner carries them out.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from dynaplan.cli.deployment import connect
from dynaplan.cli.scaling.asking import AskedCount, AskedHold, check_answered, check_gpus, settled
from dynaplan.cli.scaling.counts import ATTEMPTS, WrittenCounts, left_out_gpus, published_fleet, write_counts
from dynaplan.cli.scaling.holding import described
from dynaplan.cli.scaling.waiting import UNKNOWN_START_S
from dynaplan.config.settings.planner import KUBERNETES, LOCAL, PlannerSettings
from dynaplan.config.settings.servers import says_where
from dynaplan.fleet.holds import RoleHolds
from dynaplan.fleet.store_keys import DesiredCounts, planner_prefix
from dynaplan.graph.lifecycle import Role
from dynaplan.util.errors import (
    ClusterUnavailable,
    ConfigError,
    DeploymentError,
    PermanentError,
    TemporaryError,
)

if TYPE_CHECKING:
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.planner.ports import ClusterConnector, CountsChange
    from dynaplan.store.port import KeyValueStore

USUALLY_S = 120.0
"""Time to wait, in seconds, where nothing is known of the engines' start-up times."""

POLL_S = 0.2

environment_option = click.option(
    "--environment",
    type=click.Choice([LOCAL, KUBERNETES]),
    default=LOCAL,
    show_default=True,
    help="kubernetes: the cluster of KUBECONFIG, where a planner scales this namespace.",
)

NOT_CARRIED_OUT = (
    "It stays asked for. `dynaplan planner --environment kubernetes` carries it out, and logs what it waits "
    "for; `kubectl scale` needs no planner."
)


def deployment_here(namespace: str | None) -> RunningDeployment | None:
    """Return the deployment that runs here, and join it; None when the store is named, and none of it does.

    Raises DeploymentError when none runs here and no store is named.
    """
    source = click.get_current_context().get_parameter_source("store")
    try:
        return connect(namespace)
    except DeploymentError:
        if says_where(os.environ) or source is ParameterSource.COMMANDLINE:
            return None
        raise


async def scale_elsewhere(
    namespace: str,
    asked: Sequence[AskedCount],
    hold: AskedHold | None,
    timeout_s: float | None,
    leave_first: str = "",
    *,
    is_confirmed: bool,
) -> None:
    """Write the counts and the holds, and wait until they are acknowledged, as ``scale`` does.

    Raises DeploymentError when no ``serve`` has published a fleet there: nobody would carry them out.
    """
    from dynaplan.store import connections

    store = connections.connect_store()
    try:
        fleet = await published_fleet(store, namespace)
        if fleet is None:
            raise DeploymentError(
                f"no `dynaplan serve` of namespace {namespace} is known to the store: nobody would scale",
                hint="Name another one with --namespace, or start `dynaplan serve GRAPH` with this store. "
                "On a cluster: --environment kubernetes.",
            )
        left_out = await left_out_gpus(store, namespace)

        def change(now: DesiredCounts, holds: RoleHolds) -> tuple[dict[Role, int], RoleHolds]:
            wanted, after = settled(asked, hold, now, holds)
            if not is_confirmed:
                check_answered(wanted, after if hold else RoleHolds())
            check_gpus(fleet, wanted, left_out)
            return wanted, after

        written = await write_counts(store, namespace, change, leave_first)
        said = ", ".join(f"{role.value}={number}" for role, number in written.asked.items())
        click.echo(f"asked for {said} (decision {written.decision_id})")
        if timeout_s != 0.0:
            counts = partial(_counts, store, namespace)
            hint = "It goes on; `dynaplan status` on the host of its `serve` shows how far it is."
            await acknowledged(counts, written.decision_id, timeout_s or USUALLY_S, hint)
            click.echo("carried out")
    finally:
        await store.close()


async def acknowledged(
    read: Callable[[], Awaitable[DesiredCounts]], decision_id: int, timeout_s: float, hint: str
) -> None:
    """Return when a decision is acknowledged: it is carried out, or as far as it goes.

    Raises PermanentError when a later decision has come, TemporaryError with the hint after the time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while (counts := await read()).scaled_decision_id < decision_id:
                if counts.decision_id > decision_id:
                    raise PermanentError(
                        f"overtaken by decision {counts.decision_id}",
                        hint="The planner, or somebody else, has asked for other numbers.",
                    )
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise TemporaryError(f"not acknowledged within {timeout_s:g} s", hint=hint) from error


async def _counts(store: KeyValueStore, namespace: str) -> DesiredCounts:
    items = await store.list(planner_prefix(namespace))
    return DesiredCounts.from_keys(namespace, {item.key: item.value for item in items})


async def scale_cluster(
    namespace: str,
    asked: Sequence[AskedCount],
    hold: AskedHold | None,
    timeout_s: float | None,
    leave_first: str,
    *,
    is_confirmed: bool,
) -> None:
    """Write the counts and the holds into the planner's ConfigMap, and wait until they are acknowledged."""
    if leave_first:
        raise ConfigError(
            f"--leaving {leave_first}: on a cluster a controller chooses the pod that leaves",
            hint="The planner marks the idlest pods of a Deployment; or use `kubectl delete pod`.",
        )

    def change(now: DesiredCounts, holds: RoleHolds) -> tuple[dict[Role, int], RoleHolds]:
        wanted, after = settled(asked, hold, now, holds)
        if not is_confirmed:
            check_answered(wanted, after if hold else RoleHolds())
        return wanted, after

    connector = _connector(namespace)
    try:
        written = await _written(connector, change)
        said = ", ".join(f"{role.value}={number}" for role, number in written.asked.items())
        click.echo(f"asked for {said} (decision {written.decision_id})")
        for role in written.asked:
            if held := written.holds.of(role):
                click.echo(described(role, held, time.time()))
        if timeout_s != 0.0:
            click.echo(f"waiting for the planner of namespace {namespace} to carry it out")
            longest_s = timeout_s or UNKNOWN_START_S
            await acknowledged(connector.desired, written.decision_id, longest_s, NOT_CARRIED_OUT)
            click.echo("carried out")
    finally:
        await connector.close()


async def release_on_cluster(namespace: str, chosen: Sequence[Role]) -> WrittenCounts:
    """End the holds of these roles."""

    def without(_: DesiredCounts, holds: RoleHolds) -> tuple[dict[Role, int], RoleHolds]:
        for role in chosen:
            holds = holds.replaced(role, None)
        return {}, holds

    connector = _connector(namespace)
    try:
        return await _written(connector, without)
    finally:
        await connector.close()


def _connector(namespace: str) -> ClusterConnector:
    """Return a connector that carries nothing out: that is the planner's part, which knows its budget."""
    from dynaplan.planner import factory

    options = {"namespace": namespace, "environment": KUBERNETES, "no-operation": True}
    return factory.cluster_connector(PlannerSettings.from_options(options), dict)


async def _written(connector: ClusterConnector, change: CountsChange) -> WrittenCounts:
    """Have the change written down; tried again when somebody else decides meanwhile."""
    seen: list[tuple[DesiredCounts, RoleHolds, dict[Role, int], RoleHolds]] = []

    def noted(now: DesiredCounts, holds: RoleHolds) -> tuple[dict[Role, int], RoleHolds]:
        asked, after = change(now, holds)
        seen.append((now, holds, dict(asked), after))
        return dict(asked), after

    for attempt in range(1, ATTEMPTS + 1):
        try:
            decision_id = await connector.ask(noted)
            break
        except ClusterUnavailable:
            raise
        except TemporaryError as error:
            if attempt == ATTEMPTS:
                raise
            await asyncio.sleep(error.delay_s)
    now, before, asked, holds = seen[-1]
    return WrittenCounts(decision_id, asked, now, before, holds)
