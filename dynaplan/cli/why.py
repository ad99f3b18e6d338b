"""``dynaplan why``: what was decided lately, by whom, and why, as one story by time."""

from __future__ import annotations

import asyncio
import time
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import click

from dynaplan.cli.keys_view import key_sentence
from dynaplan.cli.models_view import event_line
from dynaplan.cli.options import namespace_argument
from dynaplan.cli.running_deployment import (
    connect,
    decisions_of,
    manual_changes_of,
    planner_components,
    service_config,
)
from dynaplan.cli.scale_counts import current_entries, planner_settings, statefile_holds
from dynaplan.cli.status_document import read_keys, read_store
from dynaplan.cli.status_view import hold_lines
from dynaplan.cli.timing import REMOVALS_TIMEOUT_S
from dynaplan.config.overrides import MODELS
from dynaplan.contract.holds import RESERVATIONS, ReservedGpus
from dynaplan.contract.model_keys import model_events_in
from dynaplan.contract.store_keys import fleet_key
from dynaplan.fleet.rules.reconcile import Removal, removals_in
from dynaplan.fleet.rules.statefile import planner_keys_of
from dynaplan.planner.recorders.decision_log import recent_records, record_time_s
from dynaplan.planner.recorders.manual_changes import ManualChange
from dynaplan.planner.rules.explain import explain, is_change
from dynaplan.store import connections
from dynaplan.util import screen
from dynaplan.util.documents import parse_object
from dynaplan.util.durations import local_time
from dynaplan.util.errors import StoreUnavailable
from dynaplan.util.tables import fold

if TYPE_CHECKING:
    from dynaplan.fleet.deployments import RunningDeployment


@click.command(name="why")
@namespace_argument
@click.option(
    "-n",
    "--last",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="How many decisions of each planner, and how many by hand.",
)
@click.option("--changes", is_flag=True, help="Only those that changed something.")
def command(namespace: str | None, last: int, changes: bool) -> None:
    """Say what the planner saw, what it decided, and why; "no change" has its reasons too.

    By time with it: what persons have changed, what was decided about models, and which workers were removed.
    """
    found = connect(namespace)
    moments, missing = _decided(found, last, changes=changes)
    moments += [(each.at_unix_s, manual_line(each)) for each in manual_changes_of(found, last)]
    fleet = asyncio.run(published(found.namespace))
    events = model_events_in(fleet)
    moments += [(each.at_unix_s, event_line(each)) for each in events]
    # A model's worker is removed for the reason that its event has.
    told = {event.sentence.partition(": ")[2] for event in events}
    removed = (each for each in removals_in(fleet) if each.why not in told)
    moments += [(each.at_unix_s, removal_line(each)) for each in removed]
    for _, text in sorted(moments, key=itemgetter(0)):
        click.echo(text if "\n" in text else fold(text, screen.width(), INDENT))
    kept = planner_keys_of(found.document)
    holds = statefile_holds(found.document).to_json()
    reservations = current_entries(ReservedGpus.from_text, kept.get(RESERVATIONS, "")).to_json()
    for line in hold_lines({"holds": holds, "reservations": reservations}, time.time()):
        click.echo(fold(line, screen.width(), INDENT))
    for line in [*missing, *map(key_sentence, asyncio.run(_asking(found)))]:
        click.echo(fold(line, screen.width()))


async def _asking(found: RunningDeployment) -> list[dict[str, Any]]:
    async with connections.open_store() as store:
        return await read_keys(found, (await read_store(store, found.namespace)).registered)


Moment = tuple[float, str]
"""What happened, in words, and when."""


def _decided(found: RunningDeployment, last: int, *, changes: bool) -> tuple[list[Moment], list[str]]:
    """Return the planners' decisions with their times, and a sentence for each planner that has made none."""
    moments, missing = [], []
    for model, component in planner_components(found).items():
        records = decisions_of(found, 10_000 if changes else last, component)
        if changes:
            records = [record for record in records if is_change(record)]
        if not records and (model or not service_config(found).get(MODELS)):
            missing.append(no_decisions(found, "change" if changes else "decision", model, component))
        of_model = f"model {model}\n" if model else ""
        moments += [
            (record_time_s(record), f"{of_model}{_shown(explain(record))}\n") for record in records[-last:]
        ]
    return moments, missing


def no_decisions(found: RunningDeployment, what: str, model: str = "", component: str = "") -> str:
    """Return why there is nothing to explain, and where an earlier deployment's decisions are.

    ``model`` is the one whose planner it is, empty where a planner plans for all workers.
    """
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
    began = local_time(found.began_s)
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
    """Read what the fleet plugin publishes; empty if it publishes nothing, or the store does not answer."""

    try:
        async with connections.open_store() as store, asyncio.timeout(REMOVALS_TIMEOUT_S):
            item = await store.get(fleet_key(namespace))
        return parse_object(item.value) if item else {}
    except (StoreUnavailable, TimeoutError, ValueError):
        return {}


def removal_line(removal: Removal) -> str:
    """Return which worker was removed, when in local time, and why."""
    return f"{local_time(removal.at_unix_s)}  {removal.worker} was removed: {removal.why}"


def manual_line(change: ManualChange) -> str:
    """Return what a person has changed, and when in local time."""
    return f"{local_time(change.at_unix_s)}  {screen.good(str(change))}"
