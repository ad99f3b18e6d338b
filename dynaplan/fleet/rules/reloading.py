"""Reloading: what each changed setting of a deployment that runs would take."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dynaplan.config.parallelism import DATA, PIPELINE, SHARED_RANKS, TENSOR
from dynaplan.fleet.store_keys import SCALED_ROLES
from dynaplan.graph.lifecycle import Role
from dynaplan.graph.model import GraphSpec, ServiceSpec

Sections = Mapping[str, Mapping[str, Any]]
"""Each service's settings as its processes read them, ``ServiceArgs`` flattened: ``ServiceArgs.workers``."""

NOT_SET = "-"
"""The value of a setting that is not set, as it is shown."""

WORKERS = "ServiceArgs.workers"

_FIXED: Mapping[Role, Mapping[str, str]] = {
    Role.FRONTEND: dict.fromkeys(("host", "port"), "serve holds the public port"),
    Role.PLANNER: {
        "environment": "serve decides by it what carries decisions out",
        "namespace": "the namespace is the deployment",
    },
}
"""Settings that ``serve`` itself has used, by role and key, and for what."""

_PARALLEL = frozenset((*TENSOR, *PIPELINE, *DATA, SHARED_RANKS))


class Taking(Enum):
    """The effort that a changed setting takes."""

    NOTHING = "nothing"
    LIVE = "live"
    RESTART = "rolling restart"
    SERVE = "needs a new serve"


@dataclass(frozen=True)
class SettingChange:
    """One setting of one service, before and after, and what it takes to apply it.

    ``restarts`` are the services whose processes are replaced; ``why`` explains what cannot be done, or need
    not be.
    """

    service: str
    key: str
    before: Any
    after: Any
    taking: Taking
    restarts: frozenset[str] = frozenset()
    why: str = ""

    @property
    def is_removed(self) -> bool:
        return bool(self.after == NOT_SET)

    @property
    def words(self) -> str:
        """The effort in words: ``rolling restart of VllmWorker``."""
        if self.taking is Taking.RESTART:
            return f"{self.taking.value} of {', '.join(sorted(self.restarts))}"
        if self.taking is Taking.SERVE:
            return f"{self.taking.value}, because {self.why}"
        return f"{self.taking.value}: {self.why}" if self.why else self.taking.value


@dataclass(frozen=True)
class ReloadRules:
    """Keys whose change takes something else than a restart of the processes of their own section.

    - ``live``: keys that take effect without a restart
    - ``of_frontends``: of a decode worker's section, read by the frontends instead of its workers
    - ``of_both``: of a decode worker's section, read by the frontends and its workers
    - ``of_planner``: of the Planner's section, read by the frontends and the Planner
    - ``agreed``: must be equal in prefill and decode workers
    - ``gpus``: the GPUs of one worker with the new settings, by service
    - ``plans_for_targets``: the Planner has a model of workers and frontends, made of their settings
    """

    live: Collection[str] = ()
    of_frontends: Collection[str] = ()
    of_both: Collection[str] = ()
    agreed: Collection[str] = ()
    gpus: Mapping[str, float] | None = None
    of_planner: Collection[str] = ()
    plans_for_targets: bool = False


def setting_changes(
    graph: GraphSpec, before: Sections, after: Sections, rules: ReloadRules
) -> tuple[SettingChange, ...]:
    """Return every setting that differs, service by service, in the order of the graph."""
    found: list[SettingChange] = []
    for service in graph.services:
        old, new = before.get(service.name, {}), after.get(service.name, {})
        for key in sorted(old.keys() | new.keys()):
            values = old.get(key, NOT_SET), new.get(key, NOT_SET)
            if values[0] != values[1]:
                taking, restarts, why = _taken(graph, service, key, rules)
                found.append(SettingChange(service.name, key, *values, taking, restarts, why))
    return tuple(found)


def restarted(changes: Collection[SettingChange], graph: GraphSpec) -> tuple[ServiceSpec, ...]:
    """Return the services to replace, in that order: prefill, decode, then all others."""
    names = {name for change in changes for name in change.restarts}
    services = [service for service in graph.services if service.name in names]
    order = {role: place for place, role in enumerate(SCALED_ROLES)}
    return tuple(sorted(services, key=lambda service: order.get(service.role, len(order))))


def _taken(
    graph: GraphSpec, service: ServiceSpec, key: str, rules: ReloadRules
) -> tuple[Taking, frozenset[str], str]:
    """Return what a change of that key takes, the services to restart, and why."""
    nobody: frozenset[str] = frozenset()
    if key == WORKERS:
        is_scaled = service.role in SCALED_ROLES
        return (
            (Taking.NOTHING, nobody, "it is the number at the start; `dynaplan scale` changes it now")
            if is_scaled
            else (Taking.SERVE, nobody, "serve starts that many")
        )
    if why := _why_fixed(graph, service, key, rules):
        return Taking.SERVE, nobody, why
    readers = frozenset(_readers(graph, service, key, rules))
    frontends = {each.name for each in graph.services if each.role is Role.FRONTEND}
    if key in rules.live and readers and readers <= frontends:
        return Taking.LIVE, nobody, ""
    served = {each.name for each in graph.services if each.role in SCALED_ROLES} | frontends
    if rules.plans_for_targets and readers & served:
        readers |= {each.name for each in graph.services if each.role is Role.PLANNER}
    return Taking.RESTART, readers, ""


def _why_fixed(graph: GraphSpec, service: ServiceSpec, key: str, rules: ReloadRules) -> str:
    """Return why only a new ``serve`` can change the setting; empty when a restart of its readers can."""
    if key.startswith("ServiceArgs."):
        return "serve divides the resources and sets the environment of processes"
    if why := _FIXED.get(service.role, {}).get(key):
        return why
    gpus = (rules.gpus or {}).get(service.name, service.gpus)
    if key in _PARALLEL and gpus != service.gpus:
        return f"a worker would take {gpus:g} GPUs in place of {service.gpus:g}"
    has_both = all(graph.of_role(role) for role in SCALED_ROLES)
    if service.role in SCALED_ROLES and has_both and key in rules.agreed:
        return "prefill and decode workers must agree on it at any time"
    return ""


def _readers(graph: GraphSpec, service: ServiceSpec, key: str, rules: ReloadRules) -> Iterator[str]:
    """Yield the services whose processes read that setting."""
    frontends = [each.name for each in graph.services if each.role is Role.FRONTEND]
    is_frontends = service.role is Role.DECODE and key in rules.of_frontends and bool(frontends)
    if not is_frontends:
        yield service.in_process_of or service.name
    is_shared = service.role is Role.DECODE and key in rules.of_both
    if is_frontends or is_shared or (service.role is Role.PLANNER and key in rules.of_planner):
        yield from frontends
