"""``dynaplan reload``: read the configuration again, show the difference, apply it while requests flow."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynaplan.cli.deployment import connect, namespace_option
from dynaplan.cli.overriding import OverridingCommand
from dynaplan.fleet.rules.reloading import (
    WORKERS,
    ReloadRules,
    SettingChange,
    Taking,
    restarted,
    setting_changes,
)
from dynaplan.fleet.store_keys import LIVE_SETTINGS
from dynaplan.util.errors import ConfigError, DeploymentError
from dynaplan.util.masking import mask_secrets
from dynaplan.util.tables import text_table

if TYPE_CHECKING:
    from dynaplan.config.deadline import PrefillDeadline
    from dynaplan.config.overrides import Sections
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.fleet.launch import Launch, Reload
    from dynaplan.graph.model import GraphSpec

LIVE_KEYS = {name.replace("_", "-"): name for name in LIVE_SETTINGS}
"""The options that change while requests flow, with the names of their keys in the store."""

ANY_QUEUE = 1_000_000
"""A limit of the prefill queue that is none."""

PLANNER = "Planner"

LONGEST_VALUE = 40
"""Characters of a value in the table of the difference."""


@click.command(
    cls=OverridingCommand, name="reload", epilog="Any option of a service: --Service.key=value, from now on"
)
@namespace_option
@click.option(
    "-f", "--config-file", metavar="FILE", help="Another YAML; default: the one that is served with."
)
@click.option("--dry-run", is_flag=True, help="Show the difference, and change nothing.")
@click.option("-y", "--yes", is_flag=True, help="Apply it without asking.")
@click.option("--timeout", type=click.FloatRange(0.0), help="Seconds that each start or drain may take.")
@click.pass_context
def command(
    ctx: click.Context,
    namespace: str | None,
    config_file: str | None,
    dry_run: bool,
    yes: bool,
    timeout: float | None,
) -> None:
    """Read the YAML again, show what has changed, and apply it without dropping a request.

    Live settings change at once; for the others workers are replaced, a new one ready before the old one is
    drained, one after another. When a new worker fails everything goes back to the settings of before.
    """
    found = connect(namespace)
    launch, unfinished = _launch_of(found)
    new = _read_again(launch, config_file, ctx.obj)
    before = launch.config if unfinished is None else unfinished
    changes = _changes(launch, before, new)
    if unfinished is not None:
        click.echo("The last reload did not come to its end; the difference is to the settings before it.")
    if not changes:
        click.echo(f"nothing has changed in {new.config_file or 'the settings'}")
        return
    click.echo(difference(changes))
    _refuse_what_serve_fixed(changes)
    if dry_run:
        return
    _ask(yes)
    from dynaplan.cli.scaling.reloading import Reloading

    reloading = Reloading(found, launch.graph, replace(new, before=before), timeout)
    asyncio.run(reloading.run(live_keys(changes, new.config), restarted(changes, launch.graph)))


def difference(changes: Sequence[SettingChange]) -> str:
    """Return the table of the changed settings: each with its old and new value, and what it takes."""
    rows = [("SETTING", "OLD", "NEW", "TAKES")]
    rows += [
        (f"{each.service}.{each.key}", _shown(each, each.before), _shown(each, each.after), each.words)
        for each in changes
    ]
    return text_table(rows)


def live_keys(changes: Sequence[SettingChange], config: Sections) -> dict[str, str]:
    """Return the values of the live settings that change, by the names of their keys in the store.

    What the new settings of ``config`` leave out has its usual value.
    """
    from dynaplan.config.settings.fields import options_of
    from dynaplan.config.settings.routing import DisaggregationSettings

    usual: dict[str, Any] = {key: each.default for key, each in options_of(DisaggregationSettings).items()}
    unsaid = DisaggregationSettings(prefill_deadline_ms=_deadline(config).ms)
    usual["max-prefill-queue-size"] = int(min(unsaid.most_queued, ANY_QUEUE))
    usual["max-local-prefill-length"] = unsaid.longest_local_tokens
    live = [each for each in changes if each.taking is Taking.LIVE]
    values = {each.key: usual[each.key] if each.is_removed else each.after for each in live}
    return {LIVE_KEYS[key]: str(value) for key, value in values.items()}


def _launch_of(found: RunningDeployment) -> tuple[Launch, Sections | None]:
    """Return the launch as it is now, and the settings before a reload that was killed, if one was."""
    from dynaplan.fleet.launch import last_reload, read_launch

    try:
        launch = read_launch(found.runtime_dir)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DeploymentError(
            f"cannot read how {found.namespace} was started: {error}",
            hint="Run this as the user who started `dynaplan serve`, with the same release.",
        ) from error
    last = last_reload(found.runtime_dir)
    return launch, last.before if last else None


def _read_again(launch: Launch, config_file: str | None, overrides: Sequence[str]) -> Reload:
    """Return the settings as a ``serve`` of now would read them; ConfigError with the key that is wrong."""
    from dynaplan.cli.starting.checking import check_settings
    from dynaplan.cli.starting.serve import described, found_file, warn
    from dynaplan.fleet.launch import Reload
    from dynaplan.graph.config import DEPLOYMENT_CONFIG_VARIABLE
    from dynaplan.graph.graph import load_graph

    here, directory = Path.cwd(), Path(launch.graph.working_dir)
    os.environ.pop(DEPLOYMENT_CONFIG_VARIABLE, None)
    named = str(here / config_file) if config_file and (here / config_file).is_file() else config_file
    name = named or launch.config_file or None
    if name is None and not overrides:
        raise ConfigError(
            "this deployment was started without a file of settings",
            hint="Name one: `dynaplan reload -f FILE`, or settings: `dynaplan reload --Service.key=value`.",
        )
    os.chdir(directory)
    all_overrides = (*launch.overrides, *overrides)
    graph, config, spec, warnings = described(
        launch.graph.identifier, name, directory, launch.namespace, all_overrides
    )
    warn(warnings + check_settings(graph, spec, config))
    file = found_file(name, directory, load_graph(launch.graph.identifier, directory))
    _check_same_services(launch.graph, spec)
    return Reload(config, str(file or ""), all_overrides)


def _check_same_services(old: GraphSpec, new: GraphSpec) -> None:
    missing = {service.name for service in old.services} - {service.name for service in new.services}
    if missing:
        raise ConfigError(
            f"{old.identifier} has no {', '.join(sorted(missing))} any more",
            hint="Other services need a new serve: `dynaplan stop`, then `dynaplan serve` again.",
        )


def _changes(launch: Launch, before: Sections, new: Reload) -> tuple[SettingChange, ...]:
    from dynaplan.config.deadline import OF_PLANNER
    from dynaplan.config.service_config import section_options
    from dynaplan.config.settings.fields import options_of
    from dynaplan.config.settings.routing import DisaggregationSettings, RoutingSettings
    from dynaplan.config.settings.worker import engine_of
    from dynaplan.config.stock import agreed_with
    from dynaplan.graph.graph import load_graph
    from dynaplan.graph.lifecycle import Role
    from dynaplan.graph.resolve import resolve_graph

    graph = launch.graph
    decode = graph.of_role(Role.DECODE)
    engine = engine_of(section_options(before, decode.name)) if decode else ""
    resolved = resolve_graph(
        load_graph(graph.identifier, Path(graph.working_dir)), new.config, launch.namespace
    )
    rules = ReloadRules(
        live=LIVE_KEYS.keys(),
        of_frontends=options_of(DisaggregationSettings).keys(),
        of_both=options_of(RoutingSettings).keys(),
        agreed={*agreed_with(engine), "engine", "model"} if engine else (),
        gpus={service.name: service.gpus for service in resolved.services},
        of_planner=OF_PLANNER if _deadline(before) != _deadline(new.config) else (),
    )
    old, changed = flattened(graph, before), flattened(graph, new.config)
    rules = replace(rules, learnt=_learnt(old, changed))
    return setting_changes(graph, old, changed, rules)


def _learnt(old: Sections, new: Sections) -> frozenset[tuple[str, str]]:
    """Return the service and key of each setting that changes what a Planner knows of the other services.

    One does when the Planner would learn otherwise with that one alone, or with all others but that one.
    """
    known = {id(sections): _known_to_planner(sections) for sections in (old, new)}
    found = set()
    for name in (old.keys() | new.keys()) - {PLANNER}:
        for key in old.get(name, {}).keys() | new.get(name, {}).keys():
            for sections, others in ((old, new), (new, old)):
                value = others.get(name, {}).get(key)
                if sections.get(name, {}).get(key) != value:
                    swapped = {**sections, name: {**sections.get(name, {}), key: value}}
                    if _known_to_planner(swapped) != known[id(sections)]:
                        found.add((name, key))
    return frozenset(found)


def _known_to_planner(sections: Sections) -> dict[str, Any]:
    """Return the options of the Planner with what it learns; empty where it asks only for thresholds."""
    from dynaplan.config.planner import with_deployed

    planner = sections.get(PLANNER, {})
    if planner.get("policy", "load") == "load":
        return {}
    return with_deployed(planner, sections)


def _deadline(config: Sections) -> PrefillDeadline:
    from dynaplan.config.frontend import deadline_in
    from dynaplan.config.service_config import section_options

    return deadline_in(config, section_options(config, "Planner"))


def flattened(graph: GraphSpec, config: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return each service's settings as its processes read them, ``ServiceArgs`` as keys of their own.

    The frontends read the name of the model from ``Common``, too.
    """
    from dynaplan.config.frontend import NAMES
    from dynaplan.config.service_config import COMMON, SERVICE_ARGS, kebab_keys, section_options
    from dynaplan.graph.lifecycle import Role

    common = kebab_keys(config.get(COMMON) or {})
    sections: dict[str, dict[str, Any]] = {}
    for service in graph.services:
        names = {key: common[key] for key in NAMES if key in common and service.role is Role.FRONTEND}
        arguments = _leaves(SERVICE_ARGS, (config.get(service.name) or {}).get(SERVICE_ARGS) or {})
        own = section_options(config, service.name)
        sections[service.name] = {**names, **own, **arguments}
    return {
        name: {key: value for key, value in section.items() if value is not None or key == WORKERS}
        for name, section in sections.items()
    }


def _leaves(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {path: value}
    return {
        name: leaf for key, each in value.items() for name, leaf in _leaves(f"{path}.{key}", each).items()
    }


def _shown(change: SettingChange, value: Any) -> str:
    text = str(mask_secrets({change.key: value})[change.key])
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def _refuse_what_serve_fixed(changes: Sequence[SettingChange]) -> None:
    """Raise ConfigError when a setting needs a new serve: half of a file is nobody's wish."""
    fixed = [f"{each.service}.{each.key}" for each in changes if each.taking is Taking.SERVE]
    if fixed:
        raise ConfigError(
            f"{', '.join(fixed)}: only a new serve changes {'that' if len(fixed) == 1 else 'these'}; "
            "nothing is changed",
            hint="Put the old value back, or `dynaplan stop` and serve again.",
        )


def _ask(yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("reload asks before it changes anything, and nobody can answer", hint="Add -y.")
    click.confirm("Apply it?", default=True, abort=True)
