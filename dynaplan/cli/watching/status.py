"""``dynaplan status``: every worker of the running deployments, as tables or as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dynaplan.cli.deployment import connected, namespace_argument, store_option
from dynaplan.cli.scaling.counts import held_in, readable_holds
from dynaplan.cli.scaling.holding import described
from dynaplan.cli.watching.routing import routing, routing_lines
from dynaplan.cli.watching.rows import alone_row, out_of_reach, uptime_s
from dynaplan.domain.errors import DeploymentError
from dynaplan.domain.planning.holds import HOLDS, Hold, RoleHolds
from dynaplan.domain.planning.scaling import SCALED_ROLES, planner_prefix
from dynaplan.domain.settings.planner import PlannerSettings
from dynaplan.domain.settings.servers import FILE, says_where, store_backend
from dynaplan.domain.wire.discovery import public_urls
from dynaplan.foundation import screen
from dynaplan.foundation.durations import clock
from dynaplan.foundation.tables import folded, text_table

if TYPE_CHECKING:
    from dynaplan.domain.lifecycle import Worker
    from dynaplan.domain.wire.discovery import Instance
    from dynaplan.domain.wire.store import KeyValue
    from dynaplan.domain.wire.worker_load import WorkerLoad
    from dynaplan.supervisor.deployments import RunningDeployment

ANSWER_S = 1.0
"""Half of the time in which the store must list the workers."""

DEFAULT_NAMESPACE = PlannerSettings.namespace

ENGINE_ROLES = ("decode", "prefill")
COLUMNS = ("WORKER", "ROLE", "STATE", "GPUS", "PID", "RUNNING", "WAITING", "KV", "UPTIME")
LEAST_NEEDED = ("PID", "UPTIME", "GPUS", "ROLE", "KV")
"""The columns that a narrow screen does without, the first first; before them, an engine's usual time."""


@click.command(name="status")
@namespace_argument
@store_option
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def command(namespace: str | None, as_json: bool) -> None:
    """Show the workers: role, state, GPUs, pid, running and waiting requests, KV usage, uptime.

    Without NAMESPACE every deployment that runs here has a table of its own; when none does, the components
    of the store that the environment names are shown. A worker whose engine starts is
    "loading", with the time that it usually takes. A worker whose GPU is not free is "waiting"; below the
    table stands what has the GPU.
    """
    from dynaplan.supervisor.deployments import find_deployments

    try:
        found = find_deployments(namespace)
    except DeploymentError:
        is_named = says_where(os.environ)
        if not is_named and store_backend(os.environ) != FILE:
            raise
        found, of_store = [], _document_of_store(namespace or DEFAULT_NAMESPACE)
        if not is_named and not of_store["workers"] and not of_store["not_callable"]:
            raise  # nothing at the store's usual place: nobody has meant it
    documents = [_document(each) for each in found] or [of_store]
    if as_json:
        document = documents[0] if len(documents) == 1 else {"deployments": documents}
        click.echo(json.dumps(document, indent=2))
        return
    owners = [f"serve runs as pid {each.arbiter.pid}" for each in found] or ["no serve of it runs here"]
    pages = [_page(document, owner) for document, owner in zip(documents, owners, strict=True)]
    click.echo("\n\n".join(pages))


def _document(found: RunningDeployment) -> dict[str, Any]:
    """Return the JSON form of one deployment."""
    from dynaplan.core.fleet.observing import unmanaged

    with connected(found):
        loads, waits, ignored, holds, not_callable, registered, routed = asyncio.run(_asked(found.namespace))
    held = (holds or held_in(found.document)).by_role
    usual = _usual_start_s(found)
    workers = [
        _row(worker, loads.get(worker.name), usual.get(worker.name), waits.get(worker.name, ""))
        for worker in found.workers
    ]
    workers += [alone_row(instance, loads.get(instance.worker)) for instance in unmanaged(registered)]
    return {
        "namespace": found.namespace,
        "frontend_url": found.frontend_url,
        "workers": workers,
        "waits": waits,
        "holds": {role.value: asdict(hold) for role, hold in held.items()},
        "troubles": [*_troubles(found), *out_of_reach(registered)],
        "ignored_keys": ignored,
        "not_callable": not_callable,
        "routing": routed,
    }


def _document_of_store(namespace: str) -> dict[str, Any]:
    """Return the JSON form of a namespace without a ``serve`` on this host: the components in the store."""
    loads, waits, ignored, holds, not_callable, registered, routed = asyncio.run(_asked(namespace))
    components = {each.worker: each for each in registered}
    return {
        "namespace": namespace,
        "frontend_url": ", ".join(public_urls(registered)),
        "workers": [alone_row(each, loads.get(name)) for name, each in sorted(components.items())],
        "waits": waits,
        "holds": {role.value: asdict(hold) for role, hold in holds.by_role.items()} if holds else {},
        "troubles": out_of_reach(registered),
        "ignored_keys": ignored,
        "not_callable": not_callable,
        "routing": routed,
    }


def _page(document: Mapping[str, Any], owner: str) -> str:
    """Lay one deployment out: its address, its workers, and below them what is wrong or waits."""
    head = f"{document['namespace']}  {document['frontend_url']}  {owner}"
    parts = list(document["troubles"])
    if alone := [row["worker"] for row in document["workers"] if not row["is_managed"]]:
        parts.append(f"unmanaged, so that serve neither restarts nor ends them: {', '.join(alone)}")
    for role in SCALED_ROLES:
        if hold := document["holds"].get(role.value):
            parts.append(described(role, Hold(**hold), time.time()))
    for row in document["workers"]:
        if row["reason"] and (row["state"] in ("failed", "backoff") or _is_lost(row)):
            parts.append(f"{row['worker']}: {row['reason']}{_way_out(row, document['workers'])}")
    parts += routing_lines(document["routing"])
    parts += [f"{name} waits: {reason}" for name, reason in document["waits"].items()]
    parts += [
        f"ignored: {key}: {reason}. Somebody wrote what dynaplan cannot read; delete the key."
        for key, reason in document["ignored_keys"].items()
    ]
    parts += [
        f"not callable: {key} is reached by {reached}. dynaplan calls over HTTP only:"
        " it gets no requests, and is not counted."
        for key, reached in document["not_callable"].items()
    ]
    width = screen.width()
    below = [folded(part, width, "  ") for part in parts]
    return "\n\n".join([folded(head, width), table(document["workers"], width), *below])


def _row(worker: Worker, load: WorkerLoad | None, usually_s: float | None, waits: str = "") -> dict[str, Any]:
    """Return the JSON form of one worker; ``waits`` says why it does not start yet.

    A worker without a registration is loading its engine, unless it has been registered before: its URL is
    known then.
    """
    is_loading = (
        not waits
        and worker.state.value == "starting"
        and worker.role.value in ENGINE_ROLES
        and not worker.url
    )
    return {
        "worker": worker.name,
        "component": worker.component,
        "role": worker.role.value,
        "state": "asleep" if load and load.is_asleep else worker.state.value,
        "loading_s": round(time.monotonic() - worker.since_s, 3) if is_loading else None,
        "usually_s": usually_s if is_loading else None,
        "gpus": list(worker.gpus),
        "pid": worker.pid,
        "is_alive": _is_alive(worker),
        "running": load.running_requests if load else None,
        "waiting": load.waiting_requests if load else None,
        "kv_usage": load.kv_usage if load else None,
        "uptime_s": uptime_s(worker.started_at),
        "restarts": len(worker.restarts_s),
        "waits": waits,
        "reason": worker.reason,
        "is_managed": True,
    }


def table(workers: Sequence[Mapping[str, Any]], width: int = 0) -> str:
    """Lay the rows out under their headings; a dash is "not known" or "does not have one".

    A screen of ``width`` columns, 0 for a wide one, does without ``LEAST_NEEDED``.
    """
    whole = text_table([COLUMNS, *(_cells(row) for row in workers)])
    is_narrow = bool(width) and max(map(len, whole.splitlines())) > width
    rows = [COLUMNS, *(_cells(row, is_short=is_narrow) for row in workers)]
    return text_table(rows, width=width, dropping=LEAST_NEEDED, paint={"STATE": screen.state_coloured})


def _cells(row: Mapping[str, Any], *, is_short: bool = False) -> tuple[str, ...]:
    known = {key: "-" if row[key] is None else str(row[key]) for key in ("running", "waiting")}
    return (
        row["worker"],
        row["role"],
        _state(row, is_short=is_short),
        ",".join(map(str, row["gpus"])) or "-",
        str(row["pid"] or "-"),
        known["running"],
        known["waiting"],
        "-" if row["kv_usage"] is None else f"{row['kv_usage']:.1%}",
        "-" if row["uptime_s"] is None else clock(row["uptime_s"]),
    )


def _state(row: Mapping[str, Any], *, is_short: bool = False) -> str:
    """Return ``loading 00:23 (usually 00:41)`` for a worker whose engine starts, else its state.

    The usual time is left out of what is to be short. A worker that waits for its GPU is "waiting". A worker
    whose process is gone, which the fleet plugin has not noticed or cannot notice, is "dead".
    """
    if row["is_alive"] is False:
        return "dead"
    if row["waits"]:
        return "waiting"
    if row["loading_s"] is None:
        return str(row["state"])
    usually = "" if row["usually_s"] is None or is_short else f" (usually {clock(row['usually_s'])})"
    return f"loading {clock(row['loading_s'])}{usually}"


def _way_out(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the command that tries a failed worker again at once, as a line of its own; empty for others."""
    if row["state"] != "failed" or row["role"] not in ENGINE_ROLES:
        return ""
    present = (each for each in rows if each["component"] == row["component"])
    number = sum(each["state"] != "draining" for each in present)
    return f"\n  `dynaplan scale {row['role']}={number}` tries again at once."


def _is_alive(worker: Worker) -> bool | None:
    """Tell whether the worker's process runs; None for a worker that has none."""
    from dynaplan import wiring

    return wiring.box.processes().identify(worker.pid) == worker.started_at if worker.pid else None


def _troubles(found: RunningDeployment) -> list[str]:
    """Return a sentence for each process of the deployment's own that is dead or does not answer."""
    from dynaplan import wiring
    from dynaplan.domain.wire.pulse import PLUGIN_PULSE, SERVE_PULSE

    hints = {
        SERVE_PULSE: (
            "`dynaplan serve`",
            f"If it was stopped: `kill -CONT {found.arbiter.pid}`",
        ),
        PLUGIN_PULSE: ("the fleet plugin", "The states above may be old; serve starts it again"),
    }
    for worker in found.workers:
        if worker.role.value == "planner":
            hints[worker.name] = (f"the planner {worker.name}", "The fleet plugin starts it again")
    heartbeats = wiring.box.heartbeats(found.runtime_dir)
    pulses = {name: heartbeats.read(name) for name in hints}
    return [
        f"{trouble}. {hints[name][1]}."
        for name, pulse in pulses.items()
        if pulse and (trouble := pulse.trouble(hints[name][0]))
    ]


def _is_lost(row: Mapping[str, Any]) -> bool:
    """Tell whether the worker was registered once and has lost its registration."""
    is_starting = row["state"] == "starting" and not row["waits"]
    return is_starting and row["role"] in ENGINE_ROLES and row["loading_s"] is None


def _usual_start_s(found: RunningDeployment) -> dict[str, float | None]:
    """Return the usual start-up time of each worker in seconds, by name; None when none was measured."""
    from dynaplan import wiring
    from dynaplan.core.fleet.startup_times import startup_key, usual_s
    from dynaplan.options.service_config import CONFIG_VARIABLE, ServiceConfig, section_options

    config = ServiceConfig.from_text(found.document["environment"].get(CONFIG_VARIABLE, ""))
    times = wiring.box.startup_times(found.statefile).read()
    return {
        worker.name: usual_s(times, startup_key(worker, section_options(config, worker.component)))
        for worker in found.workers
    }


async def _asked(
    namespace: str,
) -> tuple[
    dict[str, WorkerLoad],
    dict[str, str],
    dict[str, str],
    RoleHolds | None,
    dict[str, str],
    list[Instance],
    dict[str, dict[str, str]],
]:
    """Ask the store and the workers.

    Return loads by worker name, what waits for GPUs and why by the worker's or service's name, faults of
    unreadable keys by key, holds, how instances are reached that cannot be called, by key, the
    registrations, and the sources of what frontends know of workers' caches. A worker that has no load or
    does not answer is left out; all are empty when the store does not answer, and the holds None.
    """
    from dynaplan import wiring
    from dynaplan.domain.errors import StoreUnavailable
    from dynaplan.domain.wire.discovery import SERVICES_PREFIX, Instance
    from dynaplan.runtime.unreadable import prefixes, uncallable, unreadable

    store = wiring.connections.connect_store()
    try:
        async with asyncio.timeout(2 * ANSWER_S):
            items = [item for prefix in prefixes(namespace) for item in await store.list(prefix)]
    except (StoreUnavailable, TimeoutError):
        click.echo("the key-value store does not answer: loads are not known", err=True)
        return {}, {}, {}, None, {}, [], {}
    finally:
        await store.close()
    ignored, foreign = unreadable(namespace, items), uncallable(items)
    registered = [
        Instance.from_json(item.value)
        for item in items
        if item.key.startswith(SERVICES_PREFIX) and item.key not in ignored | foreign
    ]
    urls = {instance.worker: instance.url for instance in registered}
    metrics = wiring.planning.worker_metrics()
    try:
        loads, routed = await asyncio.gather(metrics.loads(tuple(urls.values())), routing(registered))
    finally:
        await metrics.close()
    # A service without engine says zero throughout: it has no load.
    known = {worker: load for worker, load in zip(urls, loads, strict=True) if load and load != type(load)()}
    text = next((item.value for item in items if item.key == planner_prefix(namespace) + HOLDS), "")
    holds = readable_holds(text)
    return known, _waits(namespace, items, ignored), ignored, holds, foreign, registered, routed


def _waits(namespace: str, items: Iterable[KeyValue], ignored: Container[str]) -> dict[str, str]:
    """Return what the fleet plugin publishes of workers that wait for GPUs: name -> why."""
    from dynaplan.domain.planning.scaling import fleet_key
    from dynaplan.domain.wire.documents import parse_object

    texts = [item.value for item in items if item.key == fleet_key(namespace) and item.key not in ignored]
    waiting = parse_object(texts[0]).get("waiting") if texts else None
    return {str(name): str(why) for name, why in waiting.items()} if isinstance(waiting, dict) else {}
