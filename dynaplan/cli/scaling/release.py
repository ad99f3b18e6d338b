"""``dynaplan release [ROLE|gpu=N ...]``: end holds and reservations, so that the planner scales again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from dynaplan.cli.deployment import connect, namespace_option
from dynaplan.cli.scaling.afterwards import planner_settings, planners_part
from dynaplan.cli.scaling.counts import WrittenCounts, change_entries, write_counts
from dynaplan.cli.scaling.elsewhere import environment_option, release_on_cluster
from dynaplan.cli.scaling.reserve import GPU, gpus_of
from dynaplan.config.settings.planner import KUBERNETES
from dynaplan.fleet.holds import RESERVATIONS, ReservedGpus, RoleHolds, reserved_words
from dynaplan.fleet.store_keys import SCALED_ROLES, DesiredCounts
from dynaplan.graph.lifecycle import Role
from dynaplan.graph.resolve import DEFAULT_NAMESPACE
from dynaplan.util.errors import ConfigError, nearest

if TYPE_CHECKING:
    from dynaplan.fleet.deployments import RunningDeployment


@click.command(name="release")
@click.argument("chosen", nargs=-1, metavar="[ROLE|gpu=N]...")
@namespace_option
@environment_option
def command(chosen: Sequence[str], namespace: str | None, environment: str) -> None:
    """End the holds of these roles, decode or prefill, or the reservations of these GPUs.

    Without any, all holds and all reservations end. The numbers of workers stay as they are.
    """
    roles, gpus = parse_released(chosen)
    if environment == KUBERNETES:
        _release_on_cluster(namespace or DEFAULT_NAMESPACE, roles, gpus)
        return
    found = connect(namespace)
    if gpus or not chosen:
        asyncio.run(_release_gpus(found, gpus))
    if roles or not chosen:
        _release_roles(found, roles)


def parse_released(chosen: Sequence[str]) -> tuple[list[Role], frozenset[int]]:
    """Return the roles and the GPUs that are named; raises ConfigError for anything else."""
    known = {role.value: role for role in SCALED_ROLES}
    roles = [known[name] for name in chosen if name in known]
    others = [name for name in chosen if name not in known]
    for name in others:
        if not name.startswith(GPU):
            raise ConfigError(f"release {name}: no such role", hint=nearest(name, [*known, f"{GPU}7"]))
    return roles, frozenset(index for name in others for index in gpus_of(name))


def _release_on_cluster(namespace: str, roles: Sequence[Role], gpus: frozenset[int]) -> None:
    if gpus:
        raise ConfigError(
            f"release {GPU}{min(gpus)}: GPUs of a cluster are not reserved here",
            hint="Its scheduler gives them to pods.",
        )
    chosen = roles or list(SCALED_ROLES)
    _say(roles, chosen, asyncio.run(release_on_cluster(namespace, chosen)))


def _release_roles(found: RunningDeployment, roles: Sequence[Role]) -> None:
    chosen = roles or list(SCALED_ROLES)
    written = asyncio.run(_released(found, chosen))
    settings = planner_settings(found)
    if _say(roles, chosen, written) and settings:
        click.echo(planners_part(found, settings, written.counts, written.holds, is_decision=False))


def _say(roles: Sequence[Role], chosen: Sequence[Role], written: WrittenCounts) -> bool:
    """Say which holds were ended; tell whether any was in force."""
    ended = {role: hold for role in chosen if (hold := written.before.of(role))}
    for role, hold in ended.items():
        click.echo(f"released {role.value}: it was {hold}")
    for role in chosen:
        if roles and role not in ended:
            click.echo(f"{role.value} is not held")
    if not ended and not roles:
        click.echo("nothing is held")
    return bool(ended)


async def _release_gpus(found: RunningDeployment, gpus: frozenset[int]) -> None:
    """End the reservations of these GPUs; of all without any."""
    from dynaplan.store import connections

    def without(now: ReservedGpus) -> ReservedGpus:
        return now.without(gpus or frozenset(now.by_gpu))

    store = connections.connect_store()
    try:
        before, _ = await change_entries(
            store, found.namespace, RESERVATIONS, ReservedGpus.from_text, without
        )
    finally:
        await store.close()
    for index in sorted(gpus or before.by_gpu):
        made = before.by_gpu.get(index)
        click.echo(
            f"released GPU {index}: it was {reserved_words(made)}" if made else f"GPU {index} is not reserved"
        )


async def _released(found: RunningDeployment, chosen: Sequence[Role]) -> WrittenCounts:
    """End the holds of these roles."""
    from dynaplan.store import connections

    def without(_: DesiredCounts, holds: RoleHolds) -> tuple[dict[Role, int], RoleHolds]:
        for role in chosen:
            holds = holds.replaced(role, None)
        return {}, holds

    store = connections.connect_store()
    try:
        return await write_counts(store, found.namespace, without)
    finally:
        await store.close()
