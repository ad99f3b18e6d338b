"""``dynaplan release [ROLE...]``: end holds, so that the planner scales again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from dynaplan.cli.deployment import connect, namespace_option
from dynaplan.cli.scaling.afterwards import planner_settings, planners_part
from dynaplan.cli.scaling.counts import WrittenCounts, write_counts
from dynaplan.domain.lifecycle import Role
from dynaplan.domain.planning.holds import RoleHolds
from dynaplan.domain.planning.scaling import SCALED_ROLES, DesiredCounts

if TYPE_CHECKING:
    from dynaplan.supervisor.deployments import RunningDeployment


@click.command(name="release")
@click.argument(
    "roles", nargs=-1, type=click.Choice([role.value for role in SCALED_ROLES]), metavar="[ROLE]..."
)
@namespace_option
def command(roles: Sequence[str], namespace: str | None) -> None:
    """End the holds of these roles, decode or prefill, or of all. The numbers of workers stay as they are."""
    found = connect(namespace)
    chosen = [Role(name) for name in roles] or list(SCALED_ROLES)
    written = asyncio.run(_released(found, chosen))
    ended = {role: hold for role in chosen if (hold := written.before.of(role))}
    for role, hold in ended.items():
        click.echo(f"released {role.value}: it was {hold}")
    for role in chosen:
        if roles and role not in ended:
            click.echo(f"{role.value} is not held")
    if not ended and not roles:
        click.echo("nothing is held")
    settings = planner_settings(found)
    if ended and settings:
        click.echo(planners_part(found, settings, written.counts, written.holds, is_decision=False))


async def _released(found: RunningDeployment, chosen: Sequence[Role]) -> WrittenCounts:
    from dynaplan import wiring

    def without(_: DesiredCounts, holds: RoleHolds) -> tuple[dict[Role, int], RoleHolds]:
        for role in chosen:
            holds = holds.replaced(role, None)
        return {}, holds

    store = wiring.connections.connect_store()
    try:
        return await write_counts(store, found.namespace, without)
    finally:
        await store.close()
