"""The statefile's document: the workers of one deployment, their GPUs, and their arbiter.

The keys are the original's (Dynamo 0.3.2), so that its tools read our documents and we read its; it ignores
our additions. ``statefiles/`` holds the schema and one document per step of its life. The base entry of a
component, ``{namespace}_{component}``, stays when its worker goes, because it has the command of the
next one. No secret and nothing of the inherited environment is in it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from dynaplan.config.settings.frontend import DECODE_COMPONENT, PREFILL_COMPONENT
from dynaplan.contract.gpus import Gpu
from dynaplan.fleet.rules.allocation import worker_environment
from dynaplan.graph.lifecycle import HOLDS_GPUS, Role, Worker, WorkerState, worker_name
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.process.identity import ProcessIdentity
from dynaplan.util.documents import MAX_WHOLE
from dynaplan.util.errors import StatefileCorrupt
from dynaplan.util.masking import mask_all, mask_config, mask_secrets, mask_variables

if TYPE_CHECKING:
    from dynaplan.models.model import Learnt

VERSION = 1
"""The version of the fields that we add; a document without a version is the original's."""

Document = dict[str, Any]

_ORIGINAL_ROLES = {
    "Frontend": Role.FRONTEND,
    "Planner": Role.PLANNER,
    DECODE_COMPONENT: Role.DECODE,
    PREFILL_COMPONENT: Role.PREFILL,
}
"""The roles of the original's stock services, whose entries do not have theirs."""


@dataclass(frozen=True)
class Deployment:
    """The facts that stay the same while one ``serve`` runs.

    ``config`` is the merged configuration of all services; ``commands`` maps component -> command line;
    ``addresses`` holds the URLs and directories of its parts (never a token).
    """

    graph: GraphSpec
    inventory: Sequence[Gpu]
    arbiter: ProcessIdentity
    circus_endpoint: str
    config: Mapping[str, Any] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)
    addresses: Mapping[str, Any] = field(default_factory=dict)


def initial(deployment: Deployment) -> Document:
    """Return the document before any worker runs: one base entry per service with a process of its own."""
    graph = deployment.graph
    bases = [
        _base_entry(graph, service, deployment.commands.get(service.name, ""))
        for service in graph.services
        if not service.in_process_of
    ]
    return {
        "version": VERSION,
        "namespace": graph.namespace,
        "circus_endpoint": deployment.circus_endpoint,
        "arbiter": asdict(deployment.arbiter),
        "addresses": mask_secrets(deployment.addresses),
        "components": {entry["watcher_name"]: entry for entry in bases},
        "environment": {
            "DYNAMO_SERVICE_CONFIG": json.dumps(mask_variables(mask_config(deployment.config))),
            "SYSTEM_RESOURCES": {
                "total_gpus": len(deployment.inventory),
                "gpu_info": [str(gpu.index) for gpu in deployment.inventory],
                "gpus": [asdict(gpu) for gpu in deployment.inventory],
            },
        },
    }


def with_fleet(document: Document, fleet: Sequence[Worker]) -> Document:
    """Return the document with exactly these workers; a base entry without one is emptied, any other removed.

    Unknown fields are kept. A worker whose component has no base entry raises StatefileCorrupt.
    """
    inventory = inventory_of(document)
    workers = {worker.name: worker for worker in sorted(fleet, key=lambda worker: worker.index)}
    components: Document = {}
    for name, base in _base_entries(document).items():
        components[name] = _emptied(base)
        for worker in (each for each in workers.values() if each.component == base["component"]):
            known = document["components"].get(worker.name, base)
            components[worker.name] = _filled({**base, **known}, worker, inventory)
    if missing := workers.keys() - components.keys():
        raise StatefileCorrupt(f"no base entry for {', '.join(sorted(missing))}")
    return {**document, "components": components}


def with_config(document: Document, config: Mapping[str, Any]) -> Document:
    """Return the document with this configuration of all services, secrets masked."""
    environment = {
        **document["environment"],
        "DYNAMO_SERVICE_CONFIG": json.dumps(mask_variables(mask_config(config))),
    }
    return {**document, "environment": environment}


def with_services(document: Document, graph: GraphSpec, commands: Mapping[str, str]) -> Document:
    """Return the document with a base entry for each service of the graph that has none yet."""
    bases = {
        entry["watcher_name"]: entry
        for service in graph.services
        if not service.in_process_of
        for entry in [_base_entry(graph, service, commands.get(service.name, ""))]
    }
    return {**document, "components": {**bases, **document["components"]}}


def with_commands(document: Document, commands: Mapping[str, str]) -> Document:
    """Return the document with these command lines of the next workers, by component.

    The workers that run keep theirs, but for one that has its component's base entry.
    """
    bases = _base_entries(document)
    told = {
        name: {**entry, "cmd": commands.get(bases[name]["component"], entry["cmd"])}
        for name, entry in document["components"].items()
        if name in bases
    }
    return {**document, "components": {**document["components"], **told}}


def fleet_of(document: Document) -> tuple[Worker, ...]:
    """Return the workers in the document, in its order; an emptied base entry is no worker."""
    workers = (_worker(document["namespace"], name, entry) for name, entry in document["components"].items())
    return tuple(worker for worker in workers if worker.state is not WorkerState.STOPPED)


def with_planner_keys(document: Document, keys: Mapping[str, str]) -> Document:
    """Return the document with these values of the planner's keys, by the name below their prefix.

    They are there to be written into the key-value store again when it has lost them.
    """
    return {**document, "planner_keys": dict(keys)}


def planner_keys_of(document: Document) -> dict[str, str]:
    """Return the values of the planner's keys in the document; any other form is ignored."""
    return _texts(document.get("planner_keys"))


def with_live_settings(document: Document, values: Mapping[str, str]) -> Document:
    """Return the document with these values of the live settings, by the name below their prefix."""
    return {**document, "live_settings": dict(values)}


def live_settings_of(document: Document) -> dict[str, str]:
    """Return the values of the live settings in the document; any other form is ignored."""
    return _texts(document.get("live_settings"))


def with_learnt(document: Document, learnt: Mapping[str, Learnt]) -> Document:
    """Return the document with what was learnt of models, by name."""
    return {**document, "models": {name: asdict(each) for name, each in learnt.items()}}


def learnt_of(document: Document) -> dict[str, Learnt]:
    """Return what was learnt of models, by name; any other form is ignored."""
    from dynaplan.models.model import Learnt  # much, for a deployment without such models

    found = document.get("models")
    names = [each.name for each in fields(Learnt)]
    return {
        name: Learnt(**{key: entry[key] for key in names if isinstance(entry.get(key), int | float)})
        for name, entry in (found.items() if isinstance(found, dict) else ())
        if isinstance(entry, dict)
    }


def _texts(found: Any) -> dict[str, str]:
    texts = found.items() if isinstance(found, dict) else ()
    return {name: value for name, value in texts if isinstance(value, str)}


def inventory_of(document: Document) -> tuple[Gpu, ...]:
    """Return the GPUs in the document; in one of Dynamo's, which has only indices, these serve as UUIDs."""
    resources = document.get("environment", {}).get("SYSTEM_RESOURCES", {})
    if "gpus" in resources:
        return tuple(
            Gpu(int(gpu["index"]), gpu["uuid"], gpu.get("name", ""), gpu.get("memory_bytes", 0))
            for gpu in resources["gpus"]
        )
    return tuple(Gpu(int(index), str(index)) for index in resources.get("gpu_info", ()))


def arbiter_of(document: Document) -> ProcessIdentity | None:
    """Return the arbiter that runs the deployment; None in a document of Dynamo's, which names none."""
    arbiter = document.get("arbiter")
    if not arbiter:
        return None
    return ProcessIdentity(int(arbiter["pid"]), int(arbiter["started_at"]), str(arbiter["boot_id"]))


def to_json(document: Document) -> str:
    """Return the document as the text of a statefile: indented JSON and a last line break."""
    return json.dumps(document, indent=2) + "\n"


def from_json(text: str) -> Document:
    """Read a statefile's text, ours or Dynamo's.

    GPU ids become numbers. Raises StatefileCorrupt, with why.
    """
    if not text.strip():
        raise StatefileCorrupt("it is empty")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StatefileCorrupt(f"it is not JSON: {error}") from None
    try:
        return _checked(document)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise StatefileCorrupt(f"it is not a statefile: {type(error).__name__}: {error}") from None


def _checked(document: Any) -> Document:
    """The document with its GPU ids as numbers; raises unless every field that we read is what it must be."""
    if not isinstance(document, dict):
        raise TypeError(f"expected an object, found {type(document).__name__}")
    if (version := int(document.get("version", VERSION))) > VERSION:
        raise ValueError(f"version {version} is from a newer dynaplan, this one reads up to {VERSION}")
    for key in ("namespace", "circus_endpoint"):
        if not isinstance(document[key], str):
            raise TypeError(f"{key} is not a string")
    components = {name: _normal_entry(name, entry) for name, entry in document["components"].items()}
    checked: Document = {**document, "components": components}
    for worker in fleet_of(checked):
        _check_numbers(worker)
    inventory_of(checked), arbiter_of(checked)
    return checked


def _check_numbers(worker: Worker) -> None:
    """Raise ValueError for a number that no process, lease or clock can have."""
    counts = (
        worker.pid,
        worker.started_at,
        worker.instance_id,
        worker.failures,
        worker.memory_bytes,
        *worker.gpus,
    )
    times = (worker.since_s, worker.retry_at_s, worker.gpu_share, *worker.restarts_s)
    if not all(0 <= count <= MAX_WHOLE for count in counts) or not all(map(math.isfinite, times)):
        raise ValueError(f"{worker.name} has a number that is negative or beyond all bounds")


def _normal_entry(name: str, entry: Mapping[str, Any]) -> Document:
    if entry["watcher_name"] != name or not isinstance(entry["cmd"], str):
        raise ValueError(f"the entry {name} is not its own")
    if not isinstance(entry.get("env", {}), dict):
        raise TypeError(f"env of {name} is not an object")
    resources = dict(entry["resources"])
    if "allocated_gpus" in resources:
        resources["allocated_gpus"] = [int(index) for index in resources["allocated_gpus"]]
    return {**entry, "resources": resources}


def _base_entry(graph: GraphSpec, service: ServiceSpec, command: str) -> Document:
    return _emptied(
        {
            "watcher_name": worker_name(graph.namespace, service.name, 0),
            "cmd": command,
            "resources": {},
            "lease": None,
            "component": service.name,
            "role": service.role.value,
            "working_dir": graph.working_dir,
            "env": mask_all(service.envs),
        }
    )


def _emptied(entry: Document) -> Document:
    """A base entry that has no worker: what the next one needs, and nothing else."""
    worker_keys = (
        *("DYNAPLAN_WORKER_NAME", "DYNAPLAN_GPUS", "DYNAPLAN_MEMORY_FRACTION"),
        *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
    )
    env = {key: value for key, value in entry.get("env", {}).items() if key not in worker_keys}
    nobody: Document = {"state": WorkerState.STOPPED.value, "pid": 0, "started_at": 0, "url": ""}
    times: Document = {"reason": "", "since_s": 0.0, "failures": 0, "retry_at_s": 0.0, "restarts_s": []}
    return {**entry, "resources": {}, "lease": None, "env": env, **nobody, **times}


def _filled(entry: Document, worker: Worker, inventory: Sequence[Gpu]) -> Document:
    """The entry of a worker; one that holds no GPUs by its state has none in its entry either."""
    clean = _emptied(entry)
    holds = worker.gpus if worker.state in HOLDS_GPUS else ()
    resources: Document = {"allocated_gpus": list(holds)} if holds else {}
    if holds and worker.gpu_share != 1.0:
        resources["gpu_share"] = worker.gpu_share
    if worker.memory_bytes and worker.state in HOLDS_GPUS:
        resources["memory_bytes"] = worker.memory_bytes
    return {
        **clean,
        "watcher_name": worker.name,
        "resources": resources,
        "lease": worker.instance_id or None,
        "component": worker.component,
        "role": worker.role.value,
        "env": {**clean["env"], **worker_environment(worker, inventory, {})},
        "state": worker.state.value,
        "pid": worker.pid,
        "started_at": worker.started_at,
        "url": worker.url,
        "reason": worker.reason,
        "since_s": worker.since_s,
        "failures": worker.failures,
        "retry_at_s": worker.retry_at_s,
        "restarts_s": list(worker.restarts_s),
    }


def _base_entries(document: Document) -> dict[str, Document]:
    """Name -> entry of every component's base, with its component and role."""
    namespace, components = document["namespace"], document["components"]
    bases = {}
    for name, entry in components.items():
        component, role = _component(namespace, name, entry), _role(namespace, name, entry)
        if name == worker_name(namespace, component, 0):
            bases[name] = {**entry, "component": component, "role": role.value}
    return bases


def _worker(namespace: str, name: str, entry: Mapping[str, Any]) -> Worker:
    resources = entry["resources"]
    return Worker(
        name=name,
        component=_component(namespace, name, entry),
        role=_role(namespace, name, entry),
        state=WorkerState(entry.get("state", _original_state(entry))),
        gpus=tuple(resources.get("allocated_gpus", ())),
        gpu_share=float(resources.get("gpu_share", 1.0)),
        memory_bytes=int(resources.get("memory_bytes", 0)),
        pid=int(entry.get("pid", 0)),
        started_at=int(entry.get("started_at", 0)),
        instance_id=int(entry.get("lease") or 0),
        url=str(entry.get("url", "")),
        since_s=float(entry.get("since_s", 0.0)),
        restarts_s=tuple(map(float, entry.get("restarts_s", ()))),
        failures=int(entry.get("failures", 0)),
        retry_at_s=float(entry.get("retry_at_s", 0.0)),
        reason=str(entry.get("reason", "")),
    )


def _original_state(entry: Mapping[str, Any]) -> str:
    """Return the state of an entry that Dynamo has written, which has no states.

    READY, but STOPPED where its GPUs and its lease were taken away.
    """
    is_emptied = "lease" in entry and entry["lease"] is None and not entry["resources"]
    return WorkerState.STOPPED.value if is_emptied else WorkerState.READY.value


def _component(namespace: str, name: str, entry: Mapping[str, Any]) -> str:
    """Return an entry's component: from dynaplan's field, else from Dynamo's command line or the name."""
    if "component" in entry:
        return str(entry["component"])
    if option := re.search(r"--service-name[ =](\S+)", entry["cmd"]):
        return option[1]
    return re.sub(r"_\d+$", "", name.removeprefix(f"{namespace}_"))


def _role(namespace: str, name: str, entry: Mapping[str, Any]) -> Role:
    if "role" in entry:
        return Role(entry["role"])
    return _ORIGINAL_ROLES.get(_component(namespace, name, entry), Role.SERVICE)
