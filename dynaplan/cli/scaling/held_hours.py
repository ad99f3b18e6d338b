"""``dynaplan scale decode=3 --at "09:00-17:00 mon-fri"``: holds at hours of the week."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from dynaplan.cli.scaling.afterwards import planner_settings
from dynaplan.cli.scaling.asking import AskedCount, AskedHold, check_answered, check_budget, check_gpus
from dynaplan.cli.scaling.counts import change_entries, left_out_gpus, published_fleet
from dynaplan.cli.scaling.holding import described
from dynaplan.fleet.held_hours import HOURS, HeldHours
from dynaplan.fleet.holds import Hold, RoleHolds
from dynaplan.graph.lifecycle import Role
from dynaplan.util.errors import ConfigError

if TYPE_CHECKING:
    from dynaplan.fleet.deployments import RunningDeployment


async def hold_by_hours(
    found: RunningDeployment | None,
    asked: Sequence[AskedCount],
    hold: AskedHold | None,
    *,
    is_confirmed: bool,
) -> None:
    """Write the holds, and say when they are open. Raises ConfigError, or CapacityError."""
    from dynaplan.store import connections

    settings = planner_settings(found) if found else None
    if found is None or settings is None:
        raise ConfigError(
            "--at: no planner of a serve on this host scales that deployment, and it is what keeps hours",
            hint="Serve a graph with a Planner, or have cron run `dynaplan scale`.",
        )
    new = held_by_hours(asked, hold)
    store = connections.connect_store()
    try:
        fleet = await published_fleet(store, found.namespace)
        for role, held in new.items():
            holds = RoleHolds().replaced(role, held)
            if not is_confirmed:
                check_answered({}, holds)
            if fleet:
                left_out = await left_out_gpus(store, found.namespace)
                check_gpus(fleet, {role: held.at_least}, left_out)
                check_budget(settings, fleet, holds)

        def change(hours: HeldHours) -> HeldHours:
            for role, held in new.items():
                hours = hours.with_hold(role, held)
            return hours

        await change_entries(store, found.namespace, HOURS, HeldHours.from_text, change)
    finally:
        await store.close()
    for role, held in new.items():
        click.echo(described(role, held, time.time()))
    click.echo(
        f"The planner goes there at its next decision, within {settings.adjustment_interval_s:g} s of the "
        f"hour. `dynaplan release {next(iter(new)).value}` ends it."
    )


def held_by_hours(asked: Sequence[AskedCount], hold: AskedHold | None) -> dict[Role, Hold]:
    """Return the hold of each role; ConfigError for a number that depends on that of now."""
    found = {}
    for each in asked:
        if hold is None or each.more is not None:
            raise ConfigError(
                f"{each.role.value}={each.more:+}: more than now means nothing at other hours",
                hint=f"Name the number: {each.role.value}=3, or bounds: {each.role.value} --at-least 2.",
            )
        held = hold.of(each.number or 0)
        if each.number is not None and not held.allows(each.number):
            raise ConfigError(
                f"{each.role.value}={each.number} is outside of {held.bounds.removeprefix('at ')}",
                hint=f"With bounds name only the role: {each.role.value}.",
            )
        found[each.role] = held
    return found
