"""The document of ``status``: the state of a deployment, gathered from statefile, store and workers.

``status`` gathers once, ``top`` and the web page again and again. Each worker is a row, also one that no
``serve`` has started; frontends are asked how they know what workers have cached.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynaplan.cli.keys_view import key_rows
from dynaplan.cli.models_view import SavedKv, model_rows
from dynaplan.cli.running_deployment import (
    decisions_of,
    gpus_of,
    planner_components,
    serve_pid,
    service_config,
    standings_of,
)
from dynaplan.cli.scale_counts import (
    configured_planner_settings,
    current_entries,
    current_holds,
    statefile_holds,
)
from dynaplan.cli.timing import HEALTH_TIMEOUT_S, ROUTING_TIMEOUT_S, STATUS_STORE_TIMEOUT_S
from dynaplan.config import certificates
from dynaplan.config.service_config import section_options
from dynaplan.contract.holds import HOLDS, RESERVATIONS, ReservedGpus, RoleHolds, reserved_words
from dynaplan.contract.model_keys import (
    MODEL_DEMAND,
    ModelDemand,
    ModelReport,
    demand_in,
    devices_in,
    model_events_in,
    reports_in,
)
from dynaplan.contract.store_keys import FREE_GPUS, SCALED_ROLES, DesiredCounts, by_name, fleet_key
from dynaplan.engines.llamacpp.saved_slots import saved_by_model
from dynaplan.engines.worker_load import WorkerLoad, kv_pressure
from dynaplan.fleet.launch import last_reload, read_launch
from dynaplan.fleet.rules.observing import unmanaged
from dynaplan.fleet.rules.statefile import planner_keys_of
from dynaplan.fleet.startup_times import StartupTimesFile, median_startup_s, startup_key
from dynaplan.fleet.unreadable import prefixes, uncallable, unreadable
from dynaplan.graph.lifecycle import HOLDS_GPUS
from dynaplan.http.client import WholeAnswer, get, try_get
from dynaplan.http.routes import ALL_METRICS_PATH, EVENTS, ROUTING_PATH, TURNS_PATH
from dynaplan.models.model import HOST
from dynaplan.planner.learnt_timings import LearntTimings
from dynaplan.planner.metrics.worker_loads import HttpWorkerLoads
from dynaplan.process import process_table
from dynaplan.process.heartbeats import PLUGIN_HEARTBEAT, SERVE_HEARTBEAT, HeartbeatFiles
from dynaplan.store.instances import PUBLIC_URL, SERVICES_PREFIX, Instance, public_urls
from dynaplan.util.documents import parse_object
from dynaplan.util.durations import local_time, wall_clock
from dynaplan.util.errors import StoreUnavailable

if TYPE_CHECKING:
    from dynaplan.config.settings.planner import PlannerSettings
    from dynaplan.contract.gpu_standing import GpuStandings
    from dynaplan.contract.gpus import Gpu
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.fleet.reattach.versions import RunningServe
    from dynaplan.graph.lifecycle import Worker
    from dynaplan.http.tls import ClientTls
    from dynaplan.planner.ports import WorkerLoadSource
    from dynaplan.store.port import Store


@dataclass(frozen=True)
class DeploymentState:
    """The answers of the store and of the workers; all are empty when the store ``is_silent``.

    ``loads`` are by worker; ``draining`` are the workers that drain without being told to by the fleet
    plugin. ``ignored`` are the faults of unreadable keys and ``not_callable`` the addresses of instances that
    cannot be called, by key. ``fleet`` is what the fleet plugin publishes, and ``demand`` the requests for
    each model that is loaded on request. ``keys`` say who asks (``keys_view``).
    """

    loads: Mapping[str, WorkerLoad] = field(default_factory=dict)
    draining: frozenset[str] = frozenset()
    ignored: Mapping[str, str] = field(default_factory=dict)
    not_callable: Mapping[str, str] = field(default_factory=dict)
    registered: tuple[Instance, ...] = ()
    holds: RoleHolds | None = None
    reservations: ReservedGpus | None = None
    desired: DesiredCounts = field(default_factory=DesiredCounts)
    fleet: Mapping[str, Any] = field(default_factory=dict)
    demand: Mapping[str, ModelDemand] = field(default_factory=dict)
    keys: Sequence[Mapping[str, Any]] = ()
    is_silent: bool = False

    @property
    def troubles(self) -> list[str]:
        """A sentence for each thing that is wrong with the store and with the registered instances."""
        if self.is_silent:
            return ["The key-value store does not answer: loads are not known."]
        return unreachable_notes(self.registered)

    @property
    def waits(self) -> dict[str, str]:
        """Why GPUs are waited for: by the worker's name, or by the service's while the worker has none."""
        waiting = self.fleet.get("waiting")
        return {str(name): str(why) for name, why in waiting.items()} if isinstance(waiting, dict) else {}


class StatusReader:
    """Keeps the connections between one poll and the next; ``close`` ends them.

    The environment names the store, as ``connect`` leaves it.
    """

    def __init__(self, namespace: str) -> None:
        from dynaplan.store import connections

        self._namespace = namespace
        self._store: Store = connections.connect_store()
        self._metrics: WorkerLoadSource = HttpWorkerLoads(tls=certificates.authorities(os.environ))

    async def read(self, workers: Iterable[Worker] = ()) -> DeploymentState:
        """Read the store, the loads of its workers, and which of these ``workers`` drain unasked."""
        listed = await self.read_store()
        loads = await self.read_loads(listed.registered)
        return replace(listed, loads=loads, draining=await read_draining(workers))

    async def read_store(self) -> DeploymentState:
        """Read what the store has of the deployment; its workers are not asked."""
        return await read_store(self._store, self._namespace)

    async def read_loads(self, registered: Iterable[Instance]) -> dict[str, WorkerLoad]:
        """Read the loads of these workers; one that has none or does not answer is left out."""
        urls = {instance.worker: instance.url for instance in registered}
        loads = await self._metrics.loads(tuple(urls.values()))
        # A service without engine says zero throughout: it has no load.
        return {name: load for name, load in zip(urls, loads, strict=True) if load and load != type(load)()}

    async def close(self) -> None:
        await self._metrics.close()
        await self._store.close()


async def read_store(store: Store, namespace: str) -> DeploymentState:
    """Read what the store has of a deployment; its workers are not asked."""
    read = *prefixes(namespace), MODEL_DEMAND.prefix(namespace)
    try:
        async with asyncio.timeout(STATUS_STORE_TIMEOUT_S):
            *lists, demand = await asyncio.gather(*(store.list(each) for each in read))
    except (StoreUnavailable, TimeoutError):
        return DeploymentState(is_silent=True)
    items = [item for found in lists for item in found]
    ignored, foreign = unreadable(namespace, items), uncallable(items)
    registered = tuple(
        Instance.from_json(item.value)
        for item in items
        if item.key.startswith(SERVICES_PREFIX) and item.key not in ignored | foreign
    )
    keys = {item.key: item.value for item in items if item.key not in ignored}
    names = by_name(namespace, keys)
    return DeploymentState(
        ignored=ignored,
        not_callable=foreign,
        registered=registered,
        holds=current_holds(names.get(HOLDS, "")),
        reservations=current_entries(ReservedGpus.from_text, names.get(RESERVATIONS, "")),
        desired=DesiredCounts.from_keys(namespace, keys),
        fleet=parse_object(keys.get(fleet_key(namespace), "{}")),
        demand=demand_in(item.value for item in demand),
    )


async def read_draining(workers: Iterable[Worker]) -> frozenset[str]:
    """Ask the workers that have lost their registration; return those that say that they drain.

    These drain because a person has sent a signal or revoked their leases, not for the fleet plugin.
    """
    lost = [each for each in workers if each.state.value == "starting" and each.url and each.pid]
    answers = await asyncio.gather(
        *(try_get(f"{each.url}/health", timeout_s=HEALTH_TIMEOUT_S) for each in lost)
    )
    return frozenset(each.name for each, said in zip(lost, answers, strict=True) if _says_draining(said))


def _says_draining(answer: WholeAnswer | None) -> bool:
    try:
        return answer is not None and parse_object(answer.text).get("status") == "draining"
    except ValueError:
        return False


def deployment_document(
    found: RunningDeployment, answers: DeploymentState, routed: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    from dynaplan.fleet.reattach.versions import read_serve

    serve, pid = read_serve(found.runtime_dir), serve_pid(found)
    held = (answers.holds or statefile_holds(found.document)).by_role
    kept = planner_keys_of(found.document)
    reservations = answers.reservations or current_entries(ReservedGpus.from_text, kept.get(RESERVATIONS, ""))
    usual, waits, loads = usual_start_s(found), answers.waits, answers.loads
    gpus = gpus_of(found)
    shown = found.workers if gpus else [replace(each, gpus=()) for each in found.workers]
    workers = [
        worker_row(
            worker,
            loads.get(worker.name),
            usual.get(worker.name),
            waits.get(worker.name, ""),
            is_draining=worker.name in answers.draining,
        )
        for worker in shown
    ]
    workers += [unmanaged_row(each, loads.get(each.worker)) for each in unmanaged(answers.registered)]
    return {
        "namespace": found.namespace,
        "frontend_url": found.frontend_url,
        "metrics_url": found.frontend_url + ALL_METRICS_PATH,
        "log_dir": str(found.log_dir),
        "logs_at": _below_home(found.log_dir),
        "serve_pid": pid,
        "supervisor_pid": None if pid == found.arbiter.pid else found.arbiter.pid,
        "version": serve.version.number if serve else None,
        **_service(found, answers),
        **_on_request(found, answers),
        "workers": workers,
        "gpus": _gpus(gpus, found, reservations),
        "free_gpus": answers.fleet.get(FREE_GPUS) if gpus else None,
        "waits": waits,
        "keys": list(answers.keys),
        "holds": {role.value: asdict(hold) for role, hold in held.items()},
        "reservations": reservations.to_json(),
        "troubles": [*_troubles(found), *_other_version_notes(found, serve), *answers.troubles],
        "ignored_keys": dict(answers.ignored),
        "not_callable": dict(answers.not_callable),
        "routing": {worker: dict(sources) for worker, sources in routed.items()},
    }


def store_document(
    namespace: str, answers: DeploymentState, routed: Mapping[str, Mapping[str, str]]
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
        "workers": [
            unmanaged_row(each, answers.loads.get(name)) for name, each in sorted(components.items())
        ],
        "waits": answers.waits,
        "holds": {role.value: asdict(hold) for role, hold in holds.items()},
        "troubles": answers.troubles,
        "ignored_keys": dict(answers.ignored),
        "not_callable": dict(answers.not_callable),
        "routing": {worker: dict(sources) for worker, sources in routed.items()},
    }


def _service(found: RunningDeployment, answers: DeploymentState) -> dict[str, Any]:
    """Return what the deployment serves and promises, and the numbers of workers that are asked for."""

    settings, desired = configured_planner_settings(found), answers.desired
    return {
        "models": _models(answers),
        "policy": settings.policy if settings else None,
        "observes_only": bool(settings and settings.no_operation),
        "planned_models": _planned_models(found),
        "targets": _targets(settings),
        "learnt": _learnt(found),
        "adjusted": _adjusted(found),
        "slo": asdict(settings.targets()) if settings else None,
        "kv_scale_up_threshold": _kv_scale_up(settings),
        "dispatch": _dispatch(found),
        "desired": {role.value: desired.of(role) for role in SCALED_ROLES if desired.of(role) >= 0},
        "is_pending": desired.is_pending,
    }


def _on_request(found: RunningDeployment, answers: DeploymentState) -> dict[str, Any]:
    """Return the models that are loaded on request, by name, and what was last decided about them."""
    if not (reports := reports_in(answers.fleet)):
        return {"on_request": {}}
    return {
        "on_request": on_request_rows(found, answers),
        "model_events": [asdict(each) for each in model_events_in(answers.fleet)],
        "model_memory": _model_memory(found, answers, reports),
    }


def on_request_rows(found: RunningDeployment, answers: DeploymentState) -> dict[str, dict[str, Any]]:
    """Return the JSON form of each model that is loaded on request, by name."""
    return model_rows(reports_in(answers.fleet), answers.demand, saved_kv(found))


def saved_kv(found: RunningDeployment) -> dict[str, SavedKv]:
    """Return the KV entries that models have saved, by model."""
    try:
        directory = read_launch(found.runtime_dir).scratch_dir
    except (OSError, ValueError, KeyError, TypeError):  # it ends just now
        return {}
    return {
        model: SavedKv(len(files), sum(each.tokens for each in files), sum(each.size_bytes for each in files))
        for model, files in saved_by_model(directory).items()
    }


def _model_memory(
    found: RunningDeployment, answers: DeploymentState, reports: Mapping[str, ModelReport]
) -> list[dict[str, Any]]:
    """Return how the memory of each device that models share is divided, in bytes.

    Where no model computes on a GPU the machine's memory alone is shared.
    """
    models = {report.component: name for name, report in reports.items()}
    shown = {HOST, *(gpu.index for gpu in gpus_of(found))}
    devices = (each for each in devices_in(answers.fleet) if each.index in shown)
    rows = {each.index: {**each.to_json(), "by_model": Counter[str]()} for each in devices}
    for worker in found.workers:
        is_held = worker.memory_bytes and worker.state in HOLDS_GPUS
        for index in (worker.gpus or (HOST,)) if is_held else ():
            if row := rows.get(index):
                row["by_model"][models.get(worker.component, worker.component)] += worker.memory_bytes
    return list(rows.values())


def _planned_models(found: RunningDeployment) -> dict[str, dict[str, Any]]:
    """Return component, policy and targets for each model that has a planner of its own, keyed by model."""
    from dynaplan.config.model_entries import planned_models
    from dynaplan.config.planner import settings_of_models

    config = service_config(found)
    if not planned_models(config):
        return {}
    planners = settings_of_models(config, found.namespace)
    return {
        name: {"component": each.decode_component, "policy": each.policy, "targets": _targets(each)}
        for name, each in planners.items()
    }


def _targets(settings: PlannerSettings | None) -> dict[str, Any] | None:
    """Return the targets that a planner plans for; None where it plans for none."""
    return asdict(settings.targets()) if settings and settings.is_by_targets else None


def _learnt(found: RunningDeployment) -> list[str]:
    """Return what each planner knew of its engines' steps at its last decision, in the words of ``why``."""
    lines = []
    for model, component in planner_components(found).items():
        for record in decisions_of(found, 1, component):
            lines += [f"{model}: {line}" if model else line for line in learnt_lines(record)]
    return lines


def _adjusted(found: RunningDeployment) -> list[str]:
    """Return a line for each option of an engine that the planner has set."""
    last = last_reload(found.runtime_dir)
    return [
        f"{each.component}.{each.option} is {each.value} by the planner, in place of "
        + ("its default" if each.user_value is None else str(each.user_value))
        for each in (last.adjusted if last else ())
    ]


def learnt_lines(record: Mapping[str, Any]) -> list[str]:
    """Return what a recorded decision knew of the engines' steps; none of a record of another form."""
    try:
        known = LearntTimings.from_json(record["observation"].get("learnt") or {})
    except (KeyError, TypeError, ValueError, AttributeError):
        return []
    is_disaggregated = known.prefill is not None
    lacking = known.lacking(is_disaggregated=is_disaggregated)
    return [lacking] if lacking else known.lines(is_disaggregated=is_disaggregated)


def _kv_scale_up(settings: PlannerSettings | None) -> float | None:
    """Return the KV usage above which the planner adds a decode worker; None where it does not go by it."""
    return settings.decode_kv_scale_up_threshold if settings and settings.policy != "sla" else None


def _dispatch(found: RunningDeployment) -> str | None:
    """Return the order in which queued prompts are computed; None where nothing sets a deadline."""
    from dynaplan.config.frontend import configured_deadline

    config = service_config(found)
    deadline = configured_deadline(config, section_options(config, "Planner"))
    return str(deadline) if deadline.origin else None


def _below_home(path: Path) -> str:
    """Return the path as a shell takes it, ``~/...`` where it is below the home directory: it is shorter."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)


def models_of_components(answers: DeploymentState) -> dict[str, str]:
    """Return the model that the workers of each component serve, as far as it is known."""
    known = {each.component: str(each.card["model"]) for each in answers.registered if each.card.get("model")}
    return {**known, **{each.component: name for name, each in reports_in(answers.fleet).items()}}


def _models(answers: DeploymentState) -> list[str]:
    return sorted({str(each.card["model"]) for each in answers.registered if each.card.get("model")})


def _gpus(gpus: Iterable[Gpu], found: RunningDeployment, reservations: ReservedGpus) -> list[dict[str, Any]]:
    """Return the GPUs of the deployment, with the workers that hold them, and their reservations."""
    reserved, apart = reservations.in_force(time.time(), wall_clock), standings_of(found).apart
    holding = [worker for worker in found.workers if worker.state in HOLDS_GPUS]
    return [
        {
            "index": gpu.index,
            "name": gpu.name,
            "memory_bytes": gpu.memory_bytes,
            "workers": [worker.name for worker in holding if gpu.index in worker.gpus],
            "reserved": apart.get(gpu.index)
            or (reserved_words(reserved[gpu.index]) if gpu.index in reserved else ""),
            "is_apart": gpu.index in apart,
        }
        for gpu in gpus
    ]


def _other_version_notes(found: RunningDeployment, serve: RunningServe | None) -> list[str]:
    """Return a sentence about the workers that an upgrade has not renewed; none where there are no such."""
    if serve is None or not (left := serve.not_renewed(found.workers)):
        return []
    names = ", ".join(each.name for each in left)
    return [
        f"{names}: not of {serve.version}, as serve is. `dynaplan upgrade` of its environment renews them."
    ]


def illness_lines(standings: GpuStandings) -> list[str]:
    """Return a sentence for each GPU that is set apart, or ill and in use."""
    lines = []
    for index, each in sorted(standings.by_gpu.items()):
        if each.is_apart:
            again = f"tried again at {local_time(each.retry_unix_s)}; " if each.retry_unix_s else ""
            way_out = f"{again}`dynaplan gpus --readmit {index}` takes it back"
            lines.append(f"GPU {index} is {each.words} ({local_time(each.since_unix_s)}): {way_out}.")
        elif each.why:
            lines.append(
                f"GPU {index} is ill: {each.why}. It stays in use: no other is left for a decode worker."
                f" `dynaplan gpus --retire {index} --yes` ends that."
            )
    return lines


def _troubles(found: RunningDeployment) -> list[str]:
    """Return a sentence for each process of ours that is dead or silent, and for each GPU that is ill."""
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
    if serve and serve.process != found.arbiter:
        when = " after a minute of that" if serve.is_alive else ""
        hint = f"Its supervisor starts it again{when}, and requests go on"
        hints[SERVE_HEARTBEAT] = hints[SERVE_HEARTBEAT][0], hint
    silent = [
        f"{trouble}. {hints[name][1].format(pid=heartbeat.process.pid)}."
        for name, heartbeat in last_beats.items()
        if heartbeat and (trouble := heartbeat.trouble(hints[name][0]))
    ]
    return [*silent, *illness_lines(standings_of(found))]


def usual_start_s(found: RunningDeployment) -> dict[str, float | None]:
    """Return the usual start-up time of each worker in seconds, by name; None when none was measured."""
    config = service_config(found)
    times = StartupTimesFile.beside(found.statefile).read()
    return {
        worker.name: median_startup_s(times, startup_key(worker, section_options(config, worker.component)))
        for worker in found.workers
    }


ENGINE_ROLES = ("decode", "prefill")

EXTERNAL_DRAIN_REASON = "somebody revoked its lease or sent it a signal; it is started again when it has gone"


def worker_row(
    worker: Worker,
    load: WorkerLoad | None,
    usually_s: float | None,
    waits: str = "",
    *,
    is_draining: bool = False,
) -> dict[str, Any]:
    """Return the JSON form of one worker; ``waits`` is why it does not start yet.

    ``is_draining``: the worker drains, which the fleet plugin has not told it. A worker without a
    registration is loading its engine, unless it has been registered before: its URL is known then.
    """
    since_s = round(time.monotonic() - worker.since_s, 3)
    is_loading = (
        not waits
        and worker.state.value == "starting"
        and worker.role.value in ENGINE_ROLES
        and not worker.url
    )
    state = "draining" if is_draining else worker.state.value
    return {
        "worker": worker.name,
        "component": worker.component,
        "role": worker.role.value,
        "state": state,
        "loading_s": since_s if is_loading else None,
        "usually_s": usually_s if is_loading else None,
        "draining_s": since_s if state == "draining" else None,
        "gpus": list(worker.gpus),
        "pid": worker.pid,
        "is_alive": _is_alive(worker),
        "uptime_s": uptime_s(worker.started_at),
        "restarts": len(worker.restarts_s),
        "waits": waits,
        "reason": EXTERNAL_DRAIN_REASON if is_draining else worker.reason,
        "is_managed": True,
        **_load_columns(load),
    }


def unmanaged_row(instance: Instance, load: WorkerLoad | None) -> dict[str, Any]:
    """Return the JSON form of a component by its registration; it has the keys of a managed worker's."""
    return {
        "worker": instance.worker,
        "component": instance.component,
        "role": str(instance.card.get("role") or "service"),
        "state": "ready",
        "loading_s": None,
        "usually_s": None,
        "draining_s": None,
        "gpus": list(instance.card.get("gpus", ())),
        "pid": instance.pid,
        "is_alive": None,
        "uptime_s": _uptime_of(instance),
        "restarts": 0,
        "waits": "",
        "reason": "",
        "is_managed": instance.is_managed,
        "host": instance.host,
        **_load_columns(load),
    }


def _load_columns(load: WorkerLoad | None) -> dict[str, Any]:
    columns = {
        "running": load.running_requests if load else None,
        "waiting": load.waiting_requests if load else None,
        "kv_usage": load.kv_usage if load else None,
        "kv_pressure": kv_pressure(load) if load else None,
    }
    return columns | {"state": "asleep"} if load and load.is_asleep else columns


def unreachable_notes(instances: Iterable[Instance]) -> list[str]:
    """Return a sentence when prompts are computed by decode workers that prefill workers cannot reach."""
    by_role: dict[object, list[Instance]] = {}
    for each in instances:
        by_role.setdefault(each.card.get("role"), []).append(each)
    alone = [
        decode.worker
        for decode in by_role.get("decode", ())
        if not all(prefill.can_hand_over_to(decode) for prefill in by_role.get("prefill", ()))
    ]
    if not alone:
        return []
    return [
        f"{', '.join(alone)} computes prompts itself: prefill workers on another host cannot hand KV entries "
        "over. vLLM's can, with kv-network and --advertise-host on both sides."
    ]


def uptime_s(started_at: int) -> float | None:
    """Return the seconds since a process began; ``started_at`` is in clock ticks since boot, 0 gives None."""
    return process_table.age_s(started_at) if started_at else None


def is_lost(row: Mapping[str, Any]) -> bool:
    """Return whether the worker was registered once and has lost its registration."""
    is_starting = row["state"] == "starting" and not row["waits"]
    return is_starting and row["role"] in ENGINE_ROLES and row["loading_s"] is None


def _is_alive(worker: Worker) -> bool | None:
    """Return whether the worker's process runs; None for a worker that has none."""
    return process_table.identify(worker.pid) == worker.started_at if worker.pid else None


def _uptime_of(instance: Instance) -> float | None:
    """Return the age in seconds of the instance's process; None when it runs on another host."""
    if instance.network != process_table.network():
        return None
    return uptime_s(process_table.identify(instance.pid) or 0)


async def read_routing(instances: Iterable[Instance]) -> dict[str, dict[str, str]]:
    """Ask the frontends among these: worker -> frontend -> the source of what it knows of the worker's cache.

    A frontend that does not answer is left out, as is one that does not route by prefix.
    """
    known: dict[str, dict[str, str]] = {}
    for frontend, answer in (await ask_frontends(instances, ROUTING_PATH)).items():
        for worker, source in answer.items():
            known.setdefault(worker, {})[frontend] = str(source)
    return known


async def read_keys(found: RunningDeployment, instances: Iterable[Instance]) -> list[dict[str, Any]]:
    """Ask the frontends for the requests of each API key; empty unless the deployment has a file of keys."""
    if not section_options(service_config(found), "Frontend").get("api-keys"):
        return []
    return key_rows((await ask_frontends(instances, TURNS_PATH)).values())


async def ask_frontends(instances: Iterable[Instance], path: str) -> dict[str, dict[str, Any]]:
    """Ask the frontends among these for a document of their own; {} of one that does not answer."""
    frontends = {each.worker: each.url for each in instances if PUBLIC_URL in each.card}
    tls = certificates.authorities(os.environ)
    answers = await asyncio.gather(*(_answer(url + path, tls) for url in frontends.values()))
    return dict(zip(frontends, answers, strict=True))


def routing_lines(known: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return sentences: workers whose engines report their caches, and each whose cache is predicted."""
    reporting = [worker for worker, sources in known.items() if set(sources.values()) == {EVENTS}]
    lines = (
        [f"routed by what its engine says it has cached: {', '.join(sorted(reporting))}"] if reporting else []
    )
    for worker, sources in sorted(known.items()):
        if worker not in reporting:
            by_source: dict[str, list[str]] = {}
            for frontend, source in sources.items():
                by_source.setdefault(source, []).append(frontend)
            where = "; ".join(
                source if len(by_source) == 1 else f"{source} (at {', '.join(sorted(frontends))})"
                for source, frontends in sorted(by_source.items())
            )
            lines.append(f"{worker} is routed by {where}")
    return lines


async def _answer(url: str, tls: ClientTls) -> dict[str, Any]:
    try:
        return parse_object((await get(url, timeout_s=ROUTING_TIMEOUT_S, tls=tls)).body)
    except (OSError, ValueError):
        return {}
