"""Reloading: how each changed setting of a running deployment is applied."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dynaplan.config.parallelism import DATA, PIPELINE, SHARED_RANKS, TENSOR
from dynaplan.contract.store_keys import SCALED_ROLES
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
"""Settings that ``serve`` itself reads at its start: role -> key -> what for."""

_PARALLEL = frozenset((*TENSOR, *PIPELINE, *DATA, SHARED_RANKS))


class ApplyMode(Enum):
    """How a changed setting is applied."""

    NOTHING = "nothing"
    LIVE = "live"
    REPLACE_WORKERS = "rolling restart"
    RESTART_SERVE = "needs a restart of serve"


@dataclass(frozen=True)
class SettingChange:
    """One setting of one service, before and after, and how the change is applied.

    ``restarts`` are the services whose processes are replaced; ``why`` is the reason for RESTART_SERVE and
    NOTHING.
    """

    service: str
    key: str
    before: Any
    after: Any
    apply_mode: ApplyMode
    restarts: frozenset[str] = frozenset()
    why: str = ""

    @property
    def is_removed(self) -> bool:
        return bool(self.after == NOT_SET)

    @property
    def apply_text(self) -> str:
        """How the change is applied: ``rolling restart of VllmWorker``."""
        if self.apply_mode is ApplyMode.REPLACE_WORKERS:
            return f"{self.apply_mode.value} of {', '.join(sorted(self.restarts))}"
        if self.apply_mode is ApplyMode.RESTART_SERVE:
            return f"{self.apply_mode.value}, because {self.why}"
        return f"{self.apply_mode.value}: {self.why}" if self.why else self.apply_mode.value


@dataclass(frozen=True)
class ReloadRules:
    """Keys whose change is applied otherwise than by replacing the processes of their own section.

    - ``live_keys``: take effect without a restart
    - ``frontend_keys``: of a decode worker's section, read by the frontends instead of its workers
    - ``frontend_and_decode_keys``: of a decode worker's section, read by the frontends and its workers
    - ``frontend_and_planner_keys``: of the Planner's section, read by the frontends and the Planner
    - ``must_match_keys``: must be equal in prefill and decode workers
    - ``gpus``: service -> the GPUs of one worker with the new settings
    - ``plans_for_targets``: the Planner derives a model of workers and frontends from their settings
    """

    live_keys: Collection[str] = ()
    frontend_keys: Collection[str] = ()
    frontend_and_decode_keys: Collection[str] = ()
    must_match_keys: Collection[str] = ()
    gpus: Mapping[str, float] | None = None
    frontend_and_planner_keys: Collection[str] = ()
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
                apply_mode, restarts, why = _apply_mode(graph, service, key, rules)
                found.append(SettingChange(service.name, key, *values, apply_mode, restarts, why))
    return tuple(found)


def restarted(changes: Collection[SettingChange], graph: GraphSpec) -> tuple[ServiceSpec, ...]:
    """Return the services to replace, in that order: prefill, decode, then all others."""
    names = {name for change in changes for name in change.restarts}
    services = [service for service in graph.services if service.name in names]
    order = {role: place for place, role in enumerate(SCALED_ROLES)}
    return tuple(sorted(services, key=lambda service: order.get(service.role, len(order))))


def _apply_mode(
    graph: GraphSpec, service: ServiceSpec, key: str, rules: ReloadRules
) -> tuple[ApplyMode, frozenset[str], str]:
    """Return how a change of that key is applied, the services to restart, and why."""
    nobody: frozenset[str] = frozenset()
    if key == WORKERS:
        is_scaled = service.role in SCALED_ROLES
        return (
            (ApplyMode.NOTHING, nobody, "it is the number at the start; `dynaplan scale` changes it now")
            if is_scaled
            else (ApplyMode.RESTART_SERVE, nobody, "serve starts that many")
        )
    if why := _why_fixed(graph, service, key, rules):
        return ApplyMode.RESTART_SERVE, nobody, why
    readers = frozenset(_readers(graph, service, key, rules))
    frontends = {each.name for each in graph.services if each.role is Role.FRONTEND}
    if key in rules.live_keys and readers and readers <= frontends:
        return ApplyMode.LIVE, nobody, ""
    served = {each.name for each in graph.services if each.role in SCALED_ROLES} | frontends
    if rules.plans_for_targets and readers & served:
        readers |= {each.name for each in graph.services if each.role is Role.PLANNER}
    return ApplyMode.REPLACE_WORKERS, readers, ""


def _why_fixed(graph: GraphSpec, service: ServiceSpec, key: str, rules: ReloadRules) -> str:
    """Return why changing the setting needs a restart of ``serve``; "" if its readers' restart is enough."""
    if key.startswith("ServiceArgs."):
        return "serve divides the resources and sets the environment of processes"
    if why := _FIXED.get(service.role, {}).get(key):
        return why
    gpus = (rules.gpus or {}).get(service.name, service.gpus)
    if key in _PARALLEL and gpus != service.gpus:
        return f"a worker would take {gpus:g} GPUs in place of {service.gpus:g}"
    has_both = all(graph.of_role(role) for role in SCALED_ROLES)
    if service.role in SCALED_ROLES and has_both and key in rules.must_match_keys:
        return "prefill and decode workers must agree on it at any time"
    return ""


def _readers(graph: GraphSpec, service: ServiceSpec, key: str, rules: ReloadRules) -> Iterator[str]:
    """Yield the services whose processes read that setting."""
    frontends = [each.name for each in graph.services if each.role is Role.FRONTEND]
    is_frontends = service.role is Role.DECODE and key in rules.frontend_keys and bool(frontends)
    if not is_frontends:
        yield service.in_process_of or service.name
    is_shared = service.role is Role.DECODE and key in rules.frontend_and_decode_keys
    if is_frontends or is_shared or (service.role is Role.PLANNER and key in rules.frontend_and_planner_keys):
        yield from frontends
