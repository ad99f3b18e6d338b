"""Gathers the state of a deployment, once for ``status``, again and again for ``top``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynaplan.cli.scaling.afterwards import planner_settings
from dynaplan.cli.scaling.counts import held_in, readable, readable_holds
from dynaplan.cli.watching.rows import alone_row, out_of_reach, worker_row
from dynaplan.fleet.holds import HOLDS, RESERVATIONS, ReservedGpus, RoleHolds, reserved_words
from dynaplan.fleet.rules.statefile import planner_keys_of
from dynaplan.fleet.store_keys import FREE_GPUS, DesiredCounts, fleet_key, planner_prefix
from dynaplan.graph.lifecycle import HOLDS_GPUS
from dynaplan.store.instances import SERVICES_PREFIX, Instance, public_urls
from dynaplan.util.documents import parse_object
from dynaplan.util.durations import wall_clock
from dynaplan.util.http_routes import ALL_METRICS_PATH

if TYPE_CHECKING:
    from dynaplan.engines.worker_load import WorkerLoad
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.fleet.reattach.versions import RunningServe
    from dynaplan.planner.ports import MetricsSource
    from dynaplan.store.port import Store

ANSWER_S = 1.0
"""Half of the time in which the store must list the workers."""


@dataclass(frozen=True)
class DeploymentAnswers:
    """The answers of the store and of the workers; all are empty when the store ``is_silent``.

    ``loads`` are by worker; ``ignored`` are the faults of unreadable keys and ``not_callable`` the addresses
    of instances that cannot be called, by key. ``fleet`` is what the fleet plugin publishes.
    """

    loads: Mapping[str, WorkerLoad] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    not_callable: Mapping[str, str] = field(default_factory=dict)
    registered: tuple[Instance, ...] = ()
    holds: RoleHolds | None = None
    reservations: ReservedGpus | None = None
    desired: DesiredCounts = field(default_factory=DesiredCounts)
    fleet: Mapping[str, Any] = field(default_factory=dict)
    is_silent: bool = False

    @property
    def troubles(self) -> list[str]:
        """A sentence for each thing that is wrong, by what was answered and what was not."""
        if self.is_silent:
            return ["The key-value store does not answer: loads are not known."]
        return out_of_reach(self.registered)

    @property
    def waits(self) -> dict[str, str]:
        """Why workers wait for GPUs, by the worker's or the service's name."""
        waiting = self.fleet.get("waiting")
        return {str(name): str(why) for name, why in waiting.items()} if isinstance(waiting, dict) else {}


class Gathering:
    """Keeps the connections between one look and the next; ``close`` ends them.

    The environment names the store, as ``connect`` leaves it.
    """

    def __init__(self, namespace: str) -> None:
        from dynaplan.planner import factory
        from dynaplan.store import connections

        self._namespace = namespace
        self._store: Store = connections.connect_store()
        self._metrics: MetricsSource = factory.worker_metrics()

    async def answers(self) -> DeploymentAnswers:
        """Ask the store and the workers."""
        listed = await self.listed()
        return replace(listed, loads=await self.loads(listed.registered))

    async def listed(self) -> DeploymentAnswers:
        """Ask the store, and no worker."""
        from dynaplan.fleet.unreadable import prefixes, uncallable, unreadable
        from dynaplan.util.errors import StoreUnavailable

        namespace = self._namespace
        try:
            async with asyncio.timeout(2 * ANSWER_S):
                lists = await asyncio.gather(*(self._store.list(each) for each in prefixes(namespace)))
        except (StoreUnavailable, TimeoutError):
            return DeploymentAnswers(is_silent=True)
        items = [item for found in lists for item in found]
        ignored, foreign = unreadable(namespace, items), uncallable(items)
        registered = tuple(
            Instance.from_json(item.value)
            for item in items
            if item.key.startswith(SERVICES_PREFIX) and item.key not in ignored | foreign
        )
        keys = {item.key: item.value for item in items if item.key not in ignored}
        holds = keys.get(planner_prefix(namespace) + HOLDS, "")
        return DeploymentAnswers(
            ignored=ignored,
            not_callable=foreign,
            registered=registered,
            holds=readable_holds(holds),
            reservations=readable(
                ReservedGpus.from_text, keys.get(planner_prefix(namespace) + RESERVATIONS, "")
            ),
            desired=DesiredCounts.from_keys(namespace, keys),
            fleet=parse_object(keys.get(fleet_key(namespace), "{}")),
        )

    async def loads(self, registered: Iterable[Instance]) -> dict[str, WorkerLoad]:
        """Ask these workers for their loads; one that has none or does not answer is left out."""
        urls = {instance.worker: instance.url for instance in registered}
        loads = await self._metrics.loads(tuple(urls.values()))
        # A service without engine says zero throughout: it has no load.
        return {name: load for name, load in zip(urls, loads, strict=True) if load and load != type(load)()}

    async def close(self) -> None:
        """Close the connections to the store and to the workers."""
        await self._metrics.close()
        await self._store.close()


def document_of(
    found: RunningDeployment, answers: DeploymentAnswers, routed: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """Return the JSON form of one deployment."""
    from dynaplan.fleet.reattach.versions import read_serve
    from dynaplan.fleet.rules.observing import unmanaged

    serve = read_serve(found.runtime_dir)
    held = (answers.holds or held_in(found.document)).by_role
    kept = planner_keys_of(found.document)
    reservations = answers.reservations or readable(ReservedGpus.from_text, kept.get(RESERVATIONS, ""))
    usual, waits, loads = usual_start_s(found), answers.waits, answers.loads
    workers = [
        worker_row(worker, loads.get(worker.name), usual.get(worker.name), waits.get(worker.name, ""))
        for worker in found.workers
    ]
    workers += [alone_row(each, loads.get(each.worker)) for each in unmanaged(answers.registered)]
    return {
        "namespace": found.namespace,
        "frontend_url": found.frontend_url,
        "metrics_url": found.frontend_url + ALL_METRICS_PATH,
        "log_dir": str(found.log_dir),
        "logs_at": _below_home(found.log_dir),
        "serve_pid": found.arbiter.pid,
        "version": serve.version.number if serve else None,
        **_service(found, answers),
        "workers": workers,
        "gpus": _gpus(found, reservations),
        "free_gpus": answers.fleet.get(FREE_GPUS),
        "waits": waits,
        "holds": {role.value: asdict(hold) for role, hold in held.items()},
        "reservations": reservations.to_json(),
        "troubles": [*_troubles(found), *_of_another_version(found, serve), *answers.troubles],
        "ignored_keys": dict(answers.ignored),
        "not_callable": dict(answers.not_callable),
        "routing": {worker: dict(sources) for worker, sources in routed.items()},
    }


def document_of_store(
    namespace: str, answers: DeploymentAnswers, routed: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """Return the JSON form of a namespace without a ``serve`` on this host: the components in the store."""
    registered = answers.registered
    components = {each.worker: each for each in registered}
    holds = answers.holds.by_role if answers.holds else {}
    return {
        "namespace": namespace,
        "frontend_url": ", ".join(public_urls(registered)),
        "serve_pid": None,
        "models": _models(answers),
        "workers": [alone_row(each, answers.loads.get(name)) for name, each in sorted(components.items())],
        "waits": answers.waits,
        "holds": {role.value: asdict(hold) for role, hold in holds.items()},
        "troubles": answers.troubles,
        "ignored_keys": dict(answers.ignored),
        "not_callable": dict(answers.not_callable),
        "routing": {worker: dict(sources) for worker, sources in routed.items()},
    }


def _service(found: RunningDeployment, answers: DeploymentAnswers) -> dict[str, Any]:
    """Return what the deployment serves and promises, and the numbers of workers that are asked for."""
    from dynaplan.fleet.store_keys import SCALED_ROLES

    settings, desired = planner_settings(found), answers.desired
    promised = settings.targets() if settings and settings.is_by_targets else None
    return {
        "models": _models(answers),
        "policy": settings.policy if settings else None,
        "targets": asdict(promised) if promised else None,
        "dispatch": _dispatch(found),
        "desired": {role.value: desired.of(role) for role in SCALED_ROLES if desired.of(role) >= 0},
        "is_pending": desired.is_pending,
    }


def _dispatch(found: RunningDeployment) -> str | None:
    """Return the order in which queued prompts are computed; None where nothing sets a deadline."""
    from dynaplan.config.frontend import deadline_in
    from dynaplan.config.service_config import CONFIG_VARIABLE, ServiceConfig, section_options

    config = ServiceConfig.from_text(found.document["environment"].get(CONFIG_VARIABLE, ""))
    deadline = deadline_in(config, section_options(config, "Planner"))
    return str(deadline) if deadline.origin else None


def _below_home(path: Path) -> str:
    """Return the path as a shell takes it, ``~/...`` where it is below the home directory: it is shorter."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)


def _models(answers: DeploymentAnswers) -> list[str]:
    """Return the names of the models that the workers serve."""
    return sorted({str(each.card["model"]) for each in answers.registered if each.card.get("model")})


def _gpus(found: RunningDeployment, reservations: ReservedGpus) -> list[dict[str, Any]]:
    """Return the GPUs of the deployment, with the workers that hold them, and their reservations."""
    from dynaplan.fleet.rules.statefile import inventory_of

    reserved = reservations.in_force(time.time(), wall_clock)
    holding = [worker for worker in found.workers if worker.state in HOLDS_GPUS]
    return [
        {
            "index": gpu.index,
            "name": gpu.name,
            "memory_bytes": gpu.memory_bytes,
            "workers": [worker.name for worker in holding if gpu.index in worker.gpus],
            "reserved": reserved_words(reserved[gpu.index]) if gpu.index in reserved else "",
        }
        for gpu in inventory_of(found.document)
    ]


def _of_another_version(found: RunningDeployment, serve: RunningServe | None) -> list[str]:
    """Return a sentence about the workers that an upgrade has not renewed."""
    if serve is None or not (left := serve.not_renewed(found.workers)):
        return []
    names = ", ".join(each.name for each in left)
    return [
        f"{names}: not of {serve.version}, as serve is. `dynaplan upgrade` of its environment renews them."
    ]


def _troubles(found: RunningDeployment) -> list[str]:
    """Return a sentence for each process of the deployment's own that is dead or does not answer."""
    from dynaplan.fleet.heartbeats import PLUGIN_HEARTBEAT, SERVE_HEARTBEAT, HeartbeatFiles

    hints = {
        SERVE_HEARTBEAT: ("`dynaplan serve`", "If it was stopped: `kill -CONT {pid}`"),
        PLUGIN_HEARTBEAT: ("the fleet plugin", "The states above may be old; serve starts it again"),
    }
    for worker in found.workers:
        if worker.role.value == "planner":
            hints[worker.name] = (f"the planner {worker.name}", "The fleet plugin starts it again")
    heartbeats = HeartbeatFiles.of(found.runtime_dir)
    last_beats = {name: heartbeats.read(name) for name in hints}
    serve = last_beats[SERVE_HEARTBEAT]
    if serve and serve.process != found.arbiter and not serve.is_alive:
        hints[SERVE_HEARTBEAT] = hints[SERVE_HEARTBEAT][0], "Its holder starts it again, and requests go on"
    return [
        f"{trouble}. {hints[name][1].format(pid=heartbeat.process.pid)}."
        for name, heartbeat in last_beats.items()
        if heartbeat and (trouble := heartbeat.trouble(hints[name][0]))
    ]


def usual_start_s(found: RunningDeployment) -> dict[str, float | None]:
    """Return the usual start-up time of each worker in seconds, by name; None when none was measured."""
    from dynaplan.config.service_config import CONFIG_VARIABLE, ServiceConfig, section_options
    from dynaplan.fleet.startup_times import StartupTimesFile, median_startup_s, startup_key

    config = ServiceConfig.from_text(found.document["environment"].get(CONFIG_VARIABLE, ""))
    times = StartupTimesFile.beside(found.statefile).read()
    return {
        worker.name: median_startup_s(times, startup_key(worker, section_options(config, worker.component)))
        for worker in found.workers
    }
