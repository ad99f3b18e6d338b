"""``dynaplan scale decode=3 prefill=2``: set the desired counts by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from dynaplan.cli.deployment import connect, namespace_option
from dynaplan.domain.documents import parse_object
from dynaplan.domain.errors import CapacityError, ConfigError, TemporaryError
from dynaplan.domain.lifecycle import Role
from dynaplan.domain.planning.observation import FleetCounts
from dynaplan.domain.planning.scaling import COUNT_KEYS, DesiredCounts, fleet_key, planner_prefix
from dynaplan.domain.store import Transaction

if TYPE_CHECKING:
    from dynaplan.ports import KeyValueStore
    from dynaplan.supervisor.deployments import RunningDeployment

ATTEMPTS = 5
"""Attempts to write the counts while others write them too."""


@click.command(name="scale", short_help="Set the number of workers by hand.")
@click.argument("counts", nargs=-1, required=True, metavar="ROLE=N...")
@namespace_option
@click.option("--wait/--no-wait", default=True, show_default=True, help="Return when it is carried out.")
@click.option(
    "--timeout", type=click.FloatRange(0.0), default=120.0, show_default=True, help="Seconds to wait."
)
@click.option("--yes", is_flag=True, help="Allow decode=0, with which no request is answered.")
def command(counts: Sequence[str], namespace: str | None, wait: bool, timeout: float, yes: bool) -> None:
    """Set the number of workers of a role: decode or prefill. The planner goes on from there.

    The present number again tries workers that have failed once more.
    """
    found = connect(namespace)
    wanted = dict(_parsed(text, found) for text in counts)
    if wanted.get(Role.DECODE) == 0 and not yes:
        raise ConfigError(
            "decode=0 leaves no worker that answers requests",
            hint="Add --yes if that is meant; `dynaplan stop` ends the deployment.",
        )
    asyncio.run(_scale(found, wanted, timeout if wait else 0.0, _planners_part(found)))


def _parsed(text: str, found: RunningDeployment) -> tuple[Role, int]:
    name, _, number = text.partition("=")
    components = _scaled_components(found)
    roles = {role.value: role for role in components.values()} | components
    if name not in roles:
        raise ConfigError(
            f"scale {text}: no role '{name}' here", hint=f"Known: {', '.join(roles) or 'none'}."
        )
    if not number.isdigit():
        raise ConfigError(
            f"scale {text}: '{number}' is not a number of workers", hint=f"For example: {name}=2."
        )
    return roles[name], int(number)


def _scaled_components(found: RunningDeployment) -> dict[str, Role]:
    scaled = {role.value: role for role in COUNT_KEYS}
    entries = found.document["components"].values()
    return {entry["component"]: scaled[entry["role"]] for entry in entries if entry.get("role") in scaled}


def _planners_part(found: RunningDeployment) -> str:
    """Return what the planner may do to the counts afterwards; empty when no planner scales."""
    from dynaplan.domain.settings.planner import PlannerSettings
    from dynaplan.options.planner import settings_of
    from dynaplan.options.service_config import CONFIG_VARIABLE, ServiceConfig, section_options

    planner = next((each.component for each in found.workers if each.role is Role.PLANNER), "")
    if not planner:
        return ""
    config = ServiceConfig.from_text(found.document["environment"].get(CONFIG_VARIABLE, ""))
    settings: PlannerSettings = settings_of(section_options(config, planner))
    if settings.no_operation:
        return ""
    return (
        f"The planner decides every {settings.adjustment_interval_s:g} s and may change that again. "
        "To keep it, serve with --Planner.no-operation=true."
    )


async def _scale(found: RunningDeployment, wanted: Mapping[Role, int], timeout_s: float, note: str) -> None:
    from dynaplan import wiring
    from dynaplan.supervisor.fleet.carrying_out import ScaleRequest, carried_out, check_alive

    store = wiring.connect_store()
    try:
        await _check_fits(store, found.namespace, wanted)
        check_alive(found)
        decision_id = await _write(store, found.namespace, wanted)
        said = ", ".join(f"{role.value}={number}" for role, number in wanted.items())
        click.echo(f"asked for {said} (decision {decision_id})")
        if note:
            click.echo(note)
        if timeout_s:
            await carried_out(found, store, ScaleRequest(decision_id, wanted), timeout_s)
            click.echo("carried out")
    finally:
        await store.close()


async def _check_fits(store: KeyValueStore, namespace: str, wanted: Mapping[Role, int]) -> None:
    """Raise CapacityError when all GPUs of the box are too few; GPUs that are in use now are waited for."""
    item = await store.get(fleet_key(namespace))
    if item is None:
        return
    try:
        fleet = FleetCounts.from_json(parse_object(item.value))
    except ValueError:
        return  # `status` names it; the plugin publishes a good one at its next change
    need = wanted.get(Role.PREFILL, fleet.prefill.present) * fleet.prefill.gpus
    need += wanted.get(Role.DECODE, fleet.decode.present) * fleet.decode.gpus
    if need > fleet.gpus_total:
        raise CapacityError(
            f"that needs {need:g} GPUs, and there are {fleet.gpus_total}", hint="Ask for fewer workers."
        )


async def _write(store: KeyValueStore, namespace: str, wanted: Mapping[Role, int]) -> int:
    """Write the counts in one transaction and return its decision id, which is above every id in use.

    The transaction fails, and is tried again, when a key has changed since it was read.
    """
    prefix = planner_prefix(namespace)
    for _ in range(ATTEMPTS):
        items = await store.list(prefix)
        now = DesiredCounts.from_keys(namespace, {item.key: item.value for item in items})
        puts = {prefix + COUNT_KEYS[role]: str(number) for role, number in wanted.items()}
        puts[prefix + "decision_id"] = str(now.next_decision_id)
        expected = dict.fromkeys(puts, 0) | {item.key: item.revision for item in items}
        if await store.commit(Transaction(expected=expected, puts=puts)):
            return now.next_decision_id
    raise TemporaryError("somebody else changes the desired counts all the time", hint="Try again.")
