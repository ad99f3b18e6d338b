"""``dynaplan recommend``: the option of the engines that would have kept more requests in time lately."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dynaplan.cli.options import namespace_argument
from dynaplan.cli.running_deployment import connect, decisions_of, planner_components
from dynaplan.cli.why import no_decisions
from dynaplan.config.planner import written_name
from dynaplan.fleet.launch import read_launch
from dynaplan.planner.model import DecisionRecord, OptionTrial
from dynaplan.planner.rules.option_adjustment import describe_option
from dynaplan.util import screen
from dynaplan.util.tables import fold

if TYPE_CHECKING:
    from dynaplan.fleet.deployments import RunningDeployment


@click.command(name="recommend")
@namespace_argument
def command(namespace: str | None) -> None:
    """Say which option of the engines would have kept more requests in time lately, and how to set it.

    A planner with targets tries them once an hour. `dynaplan simulate --recommend` tries policies, too.
    """
    found = connect(namespace)
    for model, component in planner_components(found).items():
        of_model = f"{model}: " if model else ""
        records = decisions_of(found, 1, component)
        words = _found(found, records[-1]) if records else no_decisions(found, "decision", model, component)
        click.echo(fold(f"{of_model}{words}", screen.width()))


def _found(found: RunningDeployment, document: dict[str, Any]) -> str:
    record = DecisionRecord.from_json(document)
    answer = record.observation.backtest
    if answer is None:
        return f"nothing is tried by the policy {record.settings.policy}: it plans for no targets"
    if answer.best_trial is None:
        missing = f": {answer.missing}" if answer.missing else ""
        return f"nothing is tried yet{missing}"
    words = describe_option(answer.best_trial, answer)
    how = _how_to_set(found, answer.best_trial) if answer.best_trial.is_certain else ""
    return f"{words}{how}"


def _how_to_set(found: RunningDeployment, trial: OptionTrial) -> str:
    """Return the command that sets the option; empty for the workers of a model that is loaded on request."""
    launch = read_launch(found.runtime_dir)
    if trial.component not in (each.name for each in launch.graph.services):
        return ""
    option = written_name(launch.settings_of(trial.component), trial.option)
    return f"\n  dynaplan reload {found.namespace} --{trial.component}.{option}={trial.value_after}"
