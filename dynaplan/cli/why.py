"""``dynaplan why``: print the planner's last decisions in words, and which workers were removed, and why."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from dynaplan.cli.options import namespace_argument
from dynaplan.cli.running_deployment import connect, decisions_of, planner_components, service_config
from dynaplan.cli.timing import REMOVALS_TIMEOUT_S
from dynaplan.util import screen
from dynaplan.util.tables import fold

if TYPE_CHECKING:
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.fleet.rules.reconcile import Removal


@click.command(name="why")
@namespace_argument
@click.option(
    "-n", "--last", type=click.IntRange(1), default=3, show_default=True, help="How many decisions."
)
@click.option("--changes", is_flag=True, help="Only those that changed something.")
def command(namespace: str | None, last: int, changes: bool) -> None:
    """Say what the planner saw, what it decided, and why; "no change" has its reasons too."""
    from dynaplan.cli.models_view import event_line
    from dynaplan.cli.scale_counts import current_entries, statefile_holds
    from dynaplan.cli.status_view import hold_lines
    from dynaplan.config.overrides import MODELS
    from dynaplan.fleet.holds import RESERVATIONS, ReservedGpus
    from dynaplan.fleet.model_keys import model_events_in
    from dynaplan.fleet.rules.reconcile import removals_in
    from dynaplan.fleet.rules.statefile import planner_keys_of
    from dynaplan.planner.rules.explain import explain, is_change

    found = connect(namespace)
    nothing = []
    for model, component in planner_components(found).items():
        records = decisions_of(found, 10_000 if changes else last, component)
        if changes:
            records = [record for record in records if is_change(record)]
        if not records and (model or not service_config(found).get(MODELS)):
            nothing.append(no_decisions(found, "change" if changes else "decision", model, component))
        elif model:
            click.echo(f"model {model}")
        for record in records[-last:]:
            click.echo(_shown(explain(record)) + "\n")
    fleet = asyncio.run(published(found.namespace))
    lines = [*map(event_line, model_events_in(fleet)), *removal_lines(removals_in(fleet))]
    for line in lines:
        click.echo(fold(line, screen.width(), INDENT))
    kept = planner_keys_of(found.document)
    holds = statefile_holds(found.document).to_json()
    reservations = current_entries(ReservedGpus.from_text, kept.get(RESERVATIONS, "")).to_json()
    for line in hold_lines({"holds": holds, "reservations": reservations}, time.time()):
        click.echo(fold(line, screen.width(), INDENT))
    for line in nothing:
        click.echo(fold(line, screen.width()))


def no_decisions(found: RunningDeployment, what: str, model: str = "", component: str = "") -> str:
    """Return why there is nothing to explain, and where an earlier deployment's decisions are.

    ``model`` is the one whose planner it is, empty where a planner plans for all workers.
    """
    from dynaplan.cli.scale_counts import planner_settings
    from dynaplan.planner.recorders.decision_log import recent_records

    if model:
        text = (
            f"No {what} about {model} yet. Its planner decides every adjustment-interval while it is loaded."
        )
    elif planner_settings(found) is None:
        text = f"No {what}: this deployment has no planner that scales it."
    else:
        text = f"No {what} yet. The planner decides every adjustment-interval, once a decode worker is ready."
    planner_dir = found.log_dir / "planner" / component
    if not recent_records(planner_dir, 1):
        return text
    began = _local(found.began_s)
    return f"{text} This deployment began at {began}; {planner_dir} has the decisions of earlier ones."


INDENT = " " * 13
"""Spaces below the label of a step."""


def _shown(explained: str) -> str:
    """Return an explanation as wide as the screen, its changes coloured."""
    verdict, *steps = fold(explained, screen.width(), INDENT).split("\n")
    is_changed = "  no change" not in verdict
    lines = [screen.good(step) if step.startswith("  changed ") else step for step in steps]
    return "\n".join([screen.good(verdict) if is_changed else verdict, *lines])


async def published(namespace: str) -> dict[str, Any]:
    """Read what the fleet plugin publishes; empty where the store does not answer."""
    from dynaplan.fleet.store_keys import fleet_key
    from dynaplan.store import connections
    from dynaplan.util.documents import parse_object
    from dynaplan.util.errors import StoreUnavailable

    try:
        async with connections.open_store() as store, asyncio.timeout(REMOVALS_TIMEOUT_S):
            item = await store.get(fleet_key(namespace))
        return parse_object(item.value) if item else {}
    except (StoreUnavailable, TimeoutError, ValueError):
        return {}


def removal_lines(found: Iterable[Removal]) -> list[str]:
    """Return a line for each, in local time."""
    return [f"{_local(each.at_unix_s)}  {each.worker} was removed: {each.why}" for each in found]


def _local(at_unix_s: float) -> str:
    return datetime.fromtimestamp(at_unix_s).isoformat(" ", "seconds")
