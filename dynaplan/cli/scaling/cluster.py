"""``dynaplan scale`` and ``release`` for a cluster: written where its planner keeps its decisions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from dynaplan.cli.scaling.asking import AskedCount, AskedHold, check_answered, settled
from dynaplan.cli.scaling.counts import ATTEMPTS, WrittenCounts
from dynaplan.cli.scaling.elsewhere import acknowledged
from dynaplan.cli.scaling.holding import described
from dynaplan.cli.scaling.waiting import UNKNOWN_START_S
from dynaplan.domain.errors import ClusterUnavailable, ConfigError, TemporaryError
from dynaplan.domain.lifecycle import Role
from dynaplan.domain.planning.holds import RoleHolds
from dynaplan.domain.planning.scaling import DesiredCounts
from dynaplan.domain.settings.planner import KUBERNETES, LOCAL, PlannerSettings

if TYPE_CHECKING:
    from dynaplan.ports.planning import ClusterConnector, CountsChange

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
    from dynaplan import wiring

    options = {"namespace": namespace, "environment": KUBERNETES, "no-operation": True}
    return wiring.planning.cluster_connector(PlannerSettings.from_options(options), dict)


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
