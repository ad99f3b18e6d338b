"""``dynaplan scale decode=3 prefill=2``: set the desired counts of a deployment of this host by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from dynaplan.cli.by_hand import record_scaling
from dynaplan.cli.options import namespace_option
from dynaplan.cli.running_deployment import connect, gpus_of, refuse_on_demand
from dynaplan.cli.scale_args import (
    CountArgument,
    ScaleArguments,
    check_budget,
    check_gpus,
    check_leaving,
    check_options,
    describe_hold,
    join_counts,
    parse_count,
    parse_hold,
)
from dynaplan.cli.scale_counts import (
    WrittenCounts,
    describe_next_decision,
    expected_times,
    left_out_gpus,
    planner_settings,
    progress_watcher,
    published_fleet,
    wait_limit_s,
    write_counts,
)
from dynaplan.contract.holds import RoleHolds
from dynaplan.contract.store_keys import COUNT_KEYS, DesiredCounts
from dynaplan.graph.lifecycle import Role
from dynaplan.store import connections
from dynaplan.util.durations import wall_clock
from dynaplan.util.errors import ConfigError
from dynaplan.util.progress import ProgressLine

if TYPE_CHECKING:
    from dynaplan.config.settings.planner import PlannerSettings
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.fleet.scale_progress import ScaleRequest
    from dynaplan.store.port import KeyValueStore


class ScaleCommand(click.Command):
    """Takes ``decode 3`` for ``decode=3``, and answers ``--decode 3`` with it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, join_counts(args))
        except click.NoSuchOption as error:
            role = error.option_name.lstrip("-")
            if role not in {each.value for each in COUNT_KEYS}:
                raise
            hint = f"Write `dynaplan scale {role}=3`, or {role}=+1 for one more."
            raise click.UsageError(f"No such option {error.option_name!r}. {hint}", ctx) from None


@click.command(cls=ScaleCommand, name="scale")
@click.argument("counts", nargs=-1, required=True, metavar="ROLE[=N]...")
@namespace_option
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
    """Set the number of workers of a role: decode or prefill. The planner continues from there.

    decode=3 asks for three, decode=+1 for one more. The present number again tries workers that have
    failed once more. The planner may change the number at its next decision, unless it is held:

    \b
    dynaplan scale decode=3 --hold                  until `dynaplan release decode`
    dynaplan scale decode=3 --for 2h                for two hours
    dynaplan scale decode --at-least 2 --for 8h     the planner scales, within bounds
    dynaplan scale decode=3 --at 09:00-17:00        at these hours of every day
    """
    found = connect(namespace)
    refuse_on_demand(found)
    asked = [parse_count(text, _roles(found)) for text in counts]
    hold = parse_hold(is_held, duration, at_least, at_most, hours)
    check_options(asked, hold)
    if hours is not None and planner_settings(found) is None:
        raise ConfigError(
            "--at: no planner scales that deployment, and it is what keeps hours",
            hint="Serve a graph with a Planner, or have cron run `dynaplan scale`.",
        )
    arguments = ScaleArguments(asked, hold, leaving or "", timeout if wait else 0.0, is_confirmed=yes)
    if leaving:
        check_leaving(leaving, asked, found.workers)
    asyncio.run(_scale(found, arguments))


def _roles(found: RunningDeployment) -> dict[str, Role]:
    """Return the roles that can be scaled, by their names and by those of their components."""
    scaled = {role.value: role for role in COUNT_KEYS}
    entries = found.document["components"].values()
    components = {
        entry["component"]: scaled[entry["role"]] for entry in entries if entry.get("role") in scaled
    }
    return {role.value: role for role in components.values()} | components


async def _scale(found: RunningDeployment, arguments: ScaleArguments) -> None:
    """Scale the deployment, and print when the planner may change the counts again."""
    from dynaplan.fleet.scale_progress import ScaleRequest, check_alive

    settings, has_gpus = planner_settings(found), bool(gpus_of(found))
    async with connections.open_store() as store:
        fleet = await published_fleet(store, found.namespace)
        left_out = await left_out_gpus(store, found.namespace)

        def change(now: DesiredCounts, holds: RoleHolds) -> tuple[dict[Role, int], RoleHolds]:
            wanted, after = arguments.resolve(now, holds)
            if fleet:
                least = {role: held.at_least for role in arguments.roles if (held := after.of(role))}
                check_gpus(fleet, wanted or least, left_out, has_gpus=has_gpus)
            if fleet and settings and arguments.hold:
                check_budget(settings, fleet, after)
            return wanted, after

        check_alive(found)
        written = await write_counts(store, found.namespace, change, arguments.leaving)
        record_scaling(found, arguments.roles, written, arguments.leaving)
        if arguments.has_hours and settings:
            _echo_hours(arguments.roles, settings, written)
            return
        _echo_written(found, settings, written, arguments.counts)
        if arguments.timeout_s != 0.0:
            is_for_others = bool(settings and settings.is_carried_out_elsewhere)
            if is_for_others:
                click.echo("environment: virtual; waiting for the program that carries decisions out")
            request = ScaleRequest(written.decision_id, written.asked, is_for_others)
            await _wait(found, store, request, arguments.timeout_s)
            click.echo("carried out")


async def _wait(
    found: RunningDeployment, store: KeyValueStore, request: ScaleRequest, timeout_s: float | None
) -> None:
    """Show the progress until the request is carried out, at most ``timeout_s``; None: as it may take."""
    from dynaplan.fleet.scale_progress import wait_carried_out

    times = expected_times(found, request.wanted)
    longest = wait_limit_s(found, request.wanted, times) if timeout_s is None else timeout_s
    with ProgressLine() as line:
        await wait_carried_out(found, store, request, longest, progress_watcher(times, line))


def _echo_hours(roles: Sequence[Role], settings: PlannerSettings, written: WrittenCounts) -> None:
    """Print which hours are held from now on, and what they replace."""
    _echo_holds(roles, written)
    click.echo(
        f"The planner goes there at its next decision, within {settings.adjustment_interval_s:g} s of the "
        f"hour. `dynaplan release {roles[0].value}` ends it."
    )


def _echo_counts(written: WrittenCounts, asked: Sequence[CountArgument]) -> None:
    more = {each.role: each.more for each in asked if each.more}
    words = {role: f" ({abs(each)} {'more' if each > 0 else 'fewer'})" for role, each in more.items()}
    counts = ", ".join(
        f"{role.value}={number}{words.get(role, '')}" for role, number in written.asked.items()
    )
    click.echo(f"asked for {counts} (decision {written.decision_id})")


def _echo_holds(roles: Iterable[Role], written: WrittenCounts) -> None:
    """Print which holds there are from now on, and what they replace."""
    for role in roles:
        before, hold = written.holds_before.of(role), written.holds.of(role)
        if hold:
            click.echo(describe_hold(role, hold, time.time()))
        if before and before != hold:
            click.echo(f"that replaces: {role.value} {before}")


def _echo_written(
    found: RunningDeployment,
    settings: PlannerSettings | None,
    written: WrittenCounts,
    asked: Sequence[CountArgument],
) -> None:
    """Print what was asked for, what is held, and what the planner may do about the rest."""
    _echo_counts(written, asked)
    _echo_holds(written.asked, written)
    if settings is None:
        if any(written.holds.of(role) for role in written.asked):
            click.echo("No planner scales this deployment now; one that is started keeps to it.")
        return
    in_force = written.holds.in_force(time.time(), wall_clock)
    free = [role for role in written.asked if not (hold := in_force.of(role)) or not hold.is_exact]
    if free:
        click.echo(describe_next_decision(found, settings, written.counts, written.holds))
    if free and not any(in_force.of(role) for role in free):
        numbers = " ".join(f"{role.value}={written.asked[role]}" for role in free)
        click.echo(f"To keep it: `dynaplan scale {numbers} --hold`, or --for 2h.")
