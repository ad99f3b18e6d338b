"""``dynaplan why``: print the planner's last decisions in words."""

from __future__ import annotations

import asyncio
import time

import click

from dynaplan.cli.deployment import connect, namespace_option
from dynaplan.cli.watching.removals import removal_lines, removals
from dynaplan.util import screen
from dynaplan.util.tables import fold


@click.command(name="why")
@namespace_option
@click.option(
    "-n", "--last", type=click.IntRange(1), default=3, show_default=True, help="How many decisions."
)
@click.option("--changes", is_flag=True, help="Only those that changed something.")
def command(namespace: str | None, last: int, changes: bool) -> None:
    """Say what the planner saw, what it decided, and why; "no change" has its reasons too."""
    from dynaplan.cli.scaling.counts import held_in, readable
    from dynaplan.cli.watching.view import kept_lines
    from dynaplan.fleet.holds import RESERVATIONS, ReservedGpus
    from dynaplan.fleet.rules.statefile import planner_keys_of
    from dynaplan.planner import factory
    from dynaplan.planner.rules.explaining import explain, is_change

    found = connect(namespace)
    records = factory.recent_decisions(found.log_dir / "planner", 10_000 if changes else last)
    if changes:
        records = [record for record in records if is_change(record)]
    for record in records[-last:]:
        click.echo(_shown(explain(record)) + "\n")
    for line in removal_lines(asyncio.run(removals(found.namespace))):
        click.echo(fold(line, screen.width(), INDENT))
    kept = planner_keys_of(found.document)
    holds = held_in(found.document).to_json()
    reservations = readable(ReservedGpus.from_text, kept.get(RESERVATIONS, "")).to_json()
    for line in kept_lines({"holds": holds, "reservations": reservations}, time.time()):
        click.echo(fold(line, screen.width(), INDENT))
    if not records:
        what = "change" if changes else "decision"
        click.echo(
            f"No {what} yet. The planner decides every adjustment-interval, once a decode worker is ready."
        )


INDENT = " " * 13
"""Spaces below the label of a step."""


def _shown(explained: str) -> str:
    """Return an explanation as wide as the screen, its changes coloured."""
    verdict, *steps = fold(explained, screen.width(), INDENT).split("\n")
    is_changed = "  no change" not in verdict
    lines = [screen.good(step) if step.startswith("  changed ") else step for step in steps]
    return "\n".join([screen.good(verdict) if is_changed else verdict, *lines])
