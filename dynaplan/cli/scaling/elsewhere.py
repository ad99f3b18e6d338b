"""``dynaplan scale`` for a namespace whose ``serve`` runs on another host: through its store alone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from dynaplan.cli.deployment import connect
from dynaplan.cli.scaling.asking import AskedCount, AskedHold, check_answered, check_gpus, settled
from dynaplan.cli.scaling.counts import left_out_gpus, published_fleet, write_counts
from dynaplan.domain.errors import DeploymentError, PermanentError, TemporaryError
from dynaplan.domain.lifecycle import Role
from dynaplan.domain.planning.holds import RoleHolds
from dynaplan.domain.planning.scaling import DesiredCounts, planner_prefix
from dynaplan.domain.settings.servers import says_where

if TYPE_CHECKING:
    from dynaplan.ports.stores import KeyValueStore
    from dynaplan.supervisor.deployments import RunningDeployment

USUALLY_S = 120.0
"""Time to wait, in seconds, where nothing is known of the engines' start-up times."""

POLL_S = 0.2


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
    from dynaplan import wiring

    store = wiring.connections.connect_store()
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
