"""``dynaplan models``, ``load``, ``unload``, ``pin``, ``unpin``: the models that are loaded on request."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from dynaplan.cli.by_hand import record_by_hand
from dynaplan.cli.models_view import READY, model_state, models_table
from dynaplan.cli.options import json_option, namespace_argument, namespace_option
from dynaplan.cli.running_deployment import connect, service_config
from dynaplan.cli.status_document import DeploymentState, on_request_rows, read_store
from dynaplan.cli.timing import WORKERS_POLL_S
from dynaplan.config.model_entries import served_models
from dynaplan.contract.model_keys import ModelReport, reports_in
from dynaplan.contract.model_orders import change_order, load_order, unload_order
from dynaplan.store import connections
from dynaplan.util import screen
from dynaplan.util.amounts import seconds_of
from dynaplan.util.errors import ConfigError, DeploymentError, TemporaryError, nearest
from dynaplan.util.progress import ProgressLine

if TYPE_CHECKING:
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.store.port import Store

UNLOADED, FAILED = "unloaded", "failed"

wait_option = click.option(
    "--wait/--no-wait", default=True, show_default=True, help="Return when it is done."
)
timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.0),
    default=600.0,
    show_default=True,
    help="Seconds to wait.",
)


@click.command(name="models")
@namespace_argument
@json_option
def models(namespace: str | None, as_json: bool) -> None:
    """Show each model: its state, its memory, who waits for it, and when it leaves."""
    found = connect(namespace)
    answers = asyncio.run(_with_store(found.namespace, _read))
    if not (rows := on_request_rows(found, answers)):
        raise no_models(found.namespace)
    if as_json:
        click.echo(json.dumps({"models": rows}, indent=2))
        return
    click.echo(models_table(rows, time.time(), screen.width()))


@click.command(name="load")
@click.argument("model")
@namespace_option
@click.option("--for", "duration", metavar="TIME", help="Keep it for 90s, 10m, 2h or 1d, idle or not.")
@wait_option
@timeout_option
def load(model: str, namespace: str | None, duration: str | None, wait: bool, timeout_s: float) -> None:
    """Load MODEL now, as a request for it would."""
    now_s = time.time()
    kept_s = seconds_of(duration) if duration else 0
    if kept_s is None:
        raise ConfigError(f"--for {duration}: no time", hint="For example 90s, 10m, 2h or 1d.")
    what = f"load, to stay for {duration}" if kept_s else "load"
    _order(namespace, model, what, load_order(now_s, kept_s), READY if wait else "", timeout_s)
    if kept_s:
        until = f"{datetime.fromtimestamp(now_s + kept_s):%Y-%m-%d %H:%M:%S}"
        click.echo(f"{model} stays until {until} at least, idle or not; its ttl counts beyond that")


@click.command(name="unload")
@click.argument("model")
@namespace_option
@wait_option
@timeout_option
def unload(model: str, namespace: str | None, wait: bool, timeout_s: float) -> None:
    """Put MODEL away after the requests that it answers. A pinned one is unpinned."""
    _order(namespace, model, "unload", unload_order(time.time()), UNLOADED if wait else "", timeout_s)


@click.command(name="pin")
@click.argument("model")
@namespace_option
@wait_option
@timeout_option
def pin(model: str, namespace: str | None, wait: bool, timeout_s: float) -> None:
    """Load MODEL, and keep it whatever others need."""
    _order(namespace, model, "pin", {"is_pinned": True}, READY if wait else "", timeout_s)
    click.echo(f"{model} is pinned")


@click.command(name="unpin")
@click.argument("model")
@namespace_option
def unpin(model: str, namespace: str | None) -> None:
    """Let MODEL leave again, when it is idle for too long or another one needs its memory."""
    _order(namespace, model, "unpin", {"is_pinned": False}, "", 0.0)
    click.echo(f"{model} is not pinned")


def _order(
    namespace: str | None, model: str, what: str, order: Mapping[str, Any], wanted: str, timeout_s: float
) -> None:
    """Write ``order`` for the model to the store, and wait for the state ``wanted``; "" waits for none.

    ``what`` describes the order in the record of changes by hand.
    """
    found = connect(namespace)
    name = model_of(found, model)

    async def write(store: Store, namespace: str) -> None:
        await change_order(store, namespace, name, order)
        record_by_hand(found, f"model {name}: {what}")
        if wanted:
            await wait_for_model(store, namespace, name, wanted, timeout_s)

    asyncio.run(_with_store(found.namespace, write))


def model_of(found: RunningDeployment, called: str) -> str:
    """Return the model that goes by that name or alias; raises UserError for an unknown one."""

    models = served_models(service_config(found))
    if not models:
        raise no_models(found.namespace)
    name = next((each.name for each in models if called in each.names), "")
    if not name:
        raise ConfigError(
            f"there is no model {called!r}", hint=nearest(called, [n for each in models for n in each.names])
        )
    return name


def no_models(namespace: str) -> DeploymentError:
    return DeploymentError(
        f"{namespace} has no models that are loaded on request",
        hint="`dynaplan serve FILE`, with a section Models, or several models, has some.",
    )


async def wait_for_model(store: Store, namespace: str, model: str, wanted: str, timeout_s: float) -> None:
    """Return when the model has the state ``wanted``, and print how long that took.

    Raises TemporaryError after ``timeout_s`` seconds, and at once when its loading is refused, or has failed
    since it was asked for.
    """
    begun_s, begun_unix_s = time.monotonic(), time.time()
    with ProgressLine() as line:
        while True:
            answers = await _read(store, namespace)
            report = reports_in(answers.fleet).get(model, ModelReport("", UNLOADED))
            if report.state == wanted:
                break
            if wanted == READY and report.refusal:
                raise TemporaryError(f"{model} is not loaded: {report.refusal.why}")
            if wanted == READY and report.state == FAILED and report.since_unix_s > begun_unix_s:
                raise TemporaryError(
                    f"{model} has failed: {report.why or 'no reason is known'}",
                    hint=f"`dynaplan logs {report.component}` shows what it said.",
                )
            if time.monotonic() - begun_s > timeout_s:
                raise TemporaryError(
                    f"{model} is {report.state} after {timeout_s:g} s: {report.why or 'no reason is known'}",
                    hint="It goes on; `dynaplan models` shows how far it is.",
                )
            line.show(f"{model} is {model_state(asdict(report), time.time())}", report.state)
            await asyncio.sleep(WORKERS_POLL_S)
    click.echo(f"{model} is {wanted} after {time.monotonic() - begun_s:.1f} s")


async def _read(store: Store, namespace: str) -> DeploymentState:
    answers = await read_store(store, namespace)
    if answers.is_silent:  # a store that says nothing does not say that the model is unloaded
        raise TemporaryError(answers.troubles[0])
    return answers


async def _with_store(namespace: str, use: Any) -> Any:
    async with connections.open_store() as store:
        return await use(store, namespace)
