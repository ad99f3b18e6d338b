"""``dynaplan scale decode=3 prefill=2``: set the desired counts by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from dynaplan.cli.deployment import namespace_option, store_option
from dynaplan.cli.scaling.afterwards import planner_settings, planners_part
from dynaplan.cli.scaling.asking import (
    AskedCount,
    AskedHold,
    check_answered,
    check_budget,
    check_gpus,
    check_leaving,
    check_options,
    parse_count,
    settled,
)
from dynaplan.cli.scaling.counts import WrittenCounts, left_out_gpus, published_fleet, write_counts
from dynaplan.cli.scaling.elsewhere import deployment_here, environment_option, scale_cluster, scale_elsewhere
from dynaplan.cli.scaling.holding import asked_hold, described
from dynaplan.cli.scaling.waiting import longest_s, times_of, watcher
from dynaplan.config.settings.planner import KUBERNETES
from dynaplan.fleet.holds import RoleHolds
from dynaplan.fleet.store_keys import COUNT_KEYS, DesiredCounts
from dynaplan.graph.lifecycle import Role
from dynaplan.graph.resolve import DEFAULT_NAMESPACE
from dynaplan.util.durations import wall_clock
from dynaplan.util.errors import ConfigError
from dynaplan.util.progress import ProgressLine

if TYPE_CHECKING:
    from dynaplan.config.settings.planner import PlannerSettings
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.fleet.scale_progress import ScaleRequest
    from dynaplan.store.port import KeyValueStore


@click.command(name="scale")
@click.argument("counts", nargs=-1, required=True, metavar="ROLE[=N]...")
@namespace_option
@store_option
@environment_option
@click.option("--hold", "is_held", is_flag=True, help="The planner keeps that number, until `release`.")
@click.option("--for", "duration", metavar="TIME", help="Hold for 90s, 10m, 2h or 1d, and no longer.")
@click.option("--at", "hours", metavar="HH:MM-HH:MM", help="Hold at 09:00-17:00 of every day.")
@click.option("--at-least", type=click.IntRange(0), metavar="N", help="The planner never goes below.")
@click.option("--at-most", type=click.IntRange(0), metavar="N", help="The planner never goes above.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Return when it is carried out.")
@click.option(
    "--timeout",
    type=click.FloatRange(0.0),
    show_default="three usual starts, and a drain; 120 at least",
    help="Seconds to wait.",
)
@click.option("--leaving", metavar="WORKER", help="Where a worker leaves, this one does.")
@click.option("--yes", is_flag=True, help="Allow decode=0, with which no request is answered.")
def command(
    counts: Sequence[str],
    namespace: str | None,
    environment: str,
    is_held: bool,
    duration: str | None,
    hours: str | None,
    at_least: int | None,
    at_most: int | None,
    wait: bool,
    timeout: float | None,
    leaving: str | None,
    yes: bool,
) -> None:
    """Set the number of workers of a role: decode or prefill. The planner goes on from there.

    decode=3 asks for three, decode=+1 for one more. The present number again tries workers that have
    failed once more. The planner may change the number at its next decision, unless it is held:

    \b
    dynaplan scale decode=3 --hold                  until `dynaplan release decode`
    dynaplan scale decode=3 --for 2h                for two hours
    dynaplan scale decode --at-least 2 --for 8h     the planner scales, within bounds
    dynaplan scale decode=3 --at 09:00-17:00        at these hours of every day

    For a serve on another host ETCD_ENDPOINTS, or --store with NATS_SERVER, names the store. With
    --environment kubernetes the planner there carries it out; it needs rights to the planner's ConfigMap.
    """
    found = None if environment == KUBERNETES else deployment_here(namespace)
    asked = [parse_count(text, _roles(found)) for text in counts]
    hold = asked_hold(is_held, duration, at_least, at_most, hours)
    check_options(asked, hold)
    if hours is not None and (found is None or planner_settings(found) is None):
        raise ConfigError(
            "--at: no planner of a serve on this host scales that deployment, and it is what keeps hours",
            hint="Serve a graph with a Planner, or have cron run `dynaplan scale`.",
        )
    timeout_s = timeout if wait else 0.0
    if leaving and found:
        check_leaving(leaving, asked, found.workers)
    if found is None:
        name = namespace or DEFAULT_NAMESPACE
        scale_there = scale_cluster if environment == KUBERNETES else scale_elsewhere
        asyncio.run(scale_there(name, asked, hold, timeout_s, leaving or "", is_confirmed=yes))
    else:
        asyncio.run(_scale(found, asked, hold, timeout_s, leaving or "", is_confirmed=yes))


def _roles(found: RunningDeployment | None) -> dict[str, Role]:
    """Return the roles that can be scaled, by their names and by those of their components."""
    scaled = {role.value: role for role in COUNT_KEYS}
    if found is None:
        return scaled
    entries = found.document["components"].values()
    components = {
        entry["component"]: scaled[entry["role"]] for entry in entries if entry.get("role") in scaled
    }
    return {role.value: role for role in components.values()} | components


async def _scale(
    found: RunningDeployment,
    asked: Sequence[AskedCount],
    hold: AskedHold | None,
    timeout_s: float | None,
    leave_first: str,
    *,
    is_confirmed: bool,
) -> None:
    from dynaplan.fleet.scale_progress import ScaleRequest, check_alive
    from dynaplan.store import connections

    settings = planner_settings(found)
    store = connections.connect_store()
    try:
        fleet = await published_fleet(store, found.namespace)
        left_out = await left_out_gpus(store, found.namespace)

        def change(now: DesiredCounts, holds: RoleHolds) -> tuple[dict[Role, int], RoleHolds]:
            wanted, after = settled(asked, hold, now, holds)
            if not is_confirmed:
                check_answered(wanted, after if hold else RoleHolds())
            if fleet:
                least = {each.role: held.at_least for each in asked if (held := after.of(each.role))}
                check_gpus(fleet, wanted or least, left_out)
            if fleet and settings and hold:
                check_budget(settings, fleet, after)
            return wanted, after

        check_alive(found)
        written = await write_counts(store, found.namespace, change, leave_first)
        if hold and hold.made.at and settings:
            _say_hours([each.role for each in asked], settings, written)
            return
        _say(found, settings, written)
        if timeout_s != 0.0:
            is_for_others = bool(settings and settings.is_carried_out_elsewhere)
            if is_for_others:
                click.echo("environment: virtual; waiting for the program that carries decisions out")
            request = ScaleRequest(written.decision_id, written.asked, is_for_others)
            await _wait(found, store, request, timeout_s)
            click.echo("carried out")
    finally:
        await store.close()


async def _wait(
    found: RunningDeployment, store: KeyValueStore, request: ScaleRequest, timeout_s: float | None
) -> None:
    """Wait, and show the progress, for that time; None: as long as it may well take."""
    from dynaplan.fleet.scale_progress import wait_carried_out

    times = times_of(found, request.wanted)
    longest = longest_s(found, request.wanted, times) if timeout_s is None else timeout_s
    with ProgressLine() as line:
        await wait_carried_out(found, store, request, longest, watcher(times, line))


def _say_hours(roles: Sequence[Role], settings: PlannerSettings, written: WrittenCounts) -> None:
    """Say which hours are held from now on, and what they replace."""
    for role in roles:
        before, hold = written.before.of(role), written.holds.of(role)
        if hold:
            click.echo(described(role, hold, time.time()))
        if before and before != hold:
            click.echo(f"that replaces: {role.value} {before}")
    click.echo(
        f"The planner goes there at its next decision, within {settings.adjustment_interval_s:g} s of the "
        f"hour. `dynaplan release {roles[0].value}` ends it."
    )


def _say(found: RunningDeployment, settings: PlannerSettings | None, written: WrittenCounts) -> None:
    """Say what was asked for, what is held, and what the planner may do about the rest."""
    said = ", ".join(f"{role.value}={number}" for role, number in written.asked.items())
    click.echo(f"asked for {said} (decision {written.decision_id})")
    for role in written.asked:
        before, hold = written.before.of(role), written.holds.of(role)
        if hold:
            click.echo(described(role, hold, time.time()))
        if before and before != hold:
            click.echo(f"that replaces: {role.value} {before}")
    if settings is None:
        if any(written.holds.of(role) for role in written.asked):
            click.echo("No planner scales this deployment now; one that is started keeps to it.")
        return
    in_force = written.holds.in_force(time.time(), wall_clock)
    free = [role for role in written.asked if not (hold := in_force.of(role)) or not hold.is_exact]
    if free:
        click.echo(planners_part(found, settings, written.counts, written.holds))
    if free and not any(in_force.of(role) for role in free):
        number = f"{free[0].value}={written.asked[free[0]]}"
        click.echo(f"To keep it: `dynaplan scale {number} --hold`, or --for 2h.")
