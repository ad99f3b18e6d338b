"""``dynaplan replay``: decide recorded observations again with other settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynaplan.cli.service_options import ServiceOptionsCommand
from dynaplan.config.overrides import sections_of
from dynaplan.planner.replay import replay
from dynaplan.planner.rules.tuning import TUNING_STAGES
from dynaplan.util import screen
from dynaplan.util.tables import fold

if TYPE_CHECKING:
    from dynaplan.planner.model import Decision
    from dynaplan.planner.replay import ReplayedDecision


@click.command(
    cls=ServiceOptionsCommand,
    name="replay",
    epilog="Any option of the planner: --Planner.key=value",
)
@click.argument("decisions", type=click.Path(exists=True, path_type=Path))
@click.option("--all", "is_all", is_flag=True, help="Show the intervals too in which both decide the same.")
@click.option("--json", "is_json", is_flag=True, help="One JSON object per interval that is shown.")
@click.pass_context
def command(context: click.Context, decisions: Path, is_all: bool, is_json: bool) -> None:
    """Run the observations of DECISIONS through other settings.

    DECISIONS is a planner's decisions.jsonl, its directory, or a deployment's log directory. Shows where
    the decisions differ, and why. Without options it shows whether this version of dynaplan still decides
    as the one that recorded.
    """

    options = sections_of(context.obj, ("Planner",))["Planner"]
    replayed = replay(decisions, options)
    shown = [each for each in replayed if is_all or not each.is_same]
    if is_json:
        for each in shown:
            click.echo(json.dumps({**asdict(each), "is_same": each.is_same}))
        return
    for each in shown:
        click.echo(fold("\n".join(_lines(each)), screen.width(), INDENT) + "\n")
    click.echo(_summary(replayed))


INDENT = " " * 13
"""Spaces below the label of a line."""


def _lines(each: ReplayedDecision) -> list[str]:
    if each.is_same:
        return [f"{each.wall_time}  both: {each.recorded.current} -> {each.recorded.desired}"]
    told = {"recorded": each.recorded, "replayed": each.replayed}
    return [
        f"{each.wall_time}  from {each.recorded.current}",
        *(f"  {name}   {_describe(decision)}" for name, decision in told.items()),
        *(
            f"  {name}   {line}"
            for name, decision in told.items()
            if not each.is_tuned_alike
            for line in _tuned(decision)
        ),
    ]


def _tuned(decision: Decision) -> list[str]:
    """Return what the decision sets of workers besides their number."""
    return [f"{step.stage}: {step.why}" for step in decision.steps if step.stage in TUNING_STAGES]


SIZED, LAST_OF_SIZING = ("decode", "prefill"), "budget"
"""Stages of a decision for latency targets: the sizes of the two roles, and the check against the budget.

When the last stage is the budget's, "within the budget" explains less than the sizes do, which are shown
then.
"""


def _describe(decision: Decision) -> str:
    if decision.is_change:
        return f"-> {decision.desired}: {decision.reason}"
    steps = decision.steps
    sized = [step.why for step in steps if step.stage in SIZED]
    is_sizing_all = bool(sized) and steps[-1].stage == LAST_OF_SIZING
    return f"no change: {'; '.join(sized) if is_sizing_all else decision.reason}"


def _summary(replayed: Sequence[ReplayedDecision]) -> str:
    different = sum(not each.is_same for each in replayed)
    changes: dict[str, Any] = {
        "recorded": sum(each.recorded.is_change for each in replayed),
        "replayed": sum(each.replayed.is_change for each in replayed),
    }
    changed = ", ".join(f"{name} {count} changes" for name, count in changes.items())
    return f"{len(replayed)} intervals, {different} decided otherwise ({changed})"
