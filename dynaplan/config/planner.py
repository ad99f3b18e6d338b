"""The planner's settings: of its section, and of what the graph's configuration says of the workers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from dynaplan.config.deadline import DEADLINE
from dynaplan.config.engine_sizes import sizes_of
from dynaplan.config.frontend import SECTIONS, deadline_in
from dynaplan.config.service_config import ServiceConfig, kebab_keys, section_options
from dynaplan.config.settings.fields import key_of
from dynaplan.config.settings.planner import PlannerSettings, worker_sizes
from dynaplan.util.errors import ConfigError

log = logging.getLogger(__name__)

ROUTER = "router"

AT_ONCE = "max-concurrent-prefills"


def settings_of(options: Mapping[str, Any]) -> PlannerSettings:
    """The settings of a Planner section; raises ConfigError for a wrong one.

    A section written for a cluster means this box when ``serve`` runs it.
    """
    known = dict(options)
    if known.get("environment") == "kubernetes":
        log.info("environment: kubernetes means local here: this planner scales this box")
        known["environment"] = "local"
    return PlannerSettings.from_options(known)


def settings_in_graph(options: Mapping[str, Any], namespace: str) -> PlannerSettings:
    """The settings of the Planner section of a graph, what it has to know of the workers filled in."""
    return settings_of(in_namespace(with_deployed(options, ServiceConfig.get_instance()), namespace))


def in_namespace(options: Mapping[str, Any], namespace: str) -> dict[str, Any]:
    """The options of a planner of this graph; ConfigError when they name another namespace.

    Statefile, queue and keys of the graph are in its namespace: a planner that looked elsewhere would scale
    another deployment, or none.
    """
    given = options.get("namespace") or namespace
    if given != namespace:
        raise ConfigError(
            f"Planner.namespace is {given!r}, but the graph runs in {namespace!r}",
            hint=f"Leave it out, or start the graph with --namespace {given}.",
        )
    return {**options, "namespace": namespace}


def with_deployed(given: Mapping[str, Any], config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The planner's options, and where they do not say it, what the options of the other services say.

    Nothing is learnt of a service that the configuration does not have.
    """
    options = {key: value for key, value in kebab_keys(given).items() if value is not None}
    learnt: dict[str, Any] = {}
    for role in ("decode", "prefill"):
        component = options.get(f"{role}-component") or getattr(PlannerSettings, f"{role}_component")
        learnt |= _learnt(section_options(config, component), role)
    given_to = (section_options(config, each).get(ROUTER) for each in SECTIONS)
    if router := next(filter(None, given_to), None):
        learnt[ROUTER] = router
    deadline = deadline_in(config, options)
    if deadline.origin:
        learnt[DEADLINE] = deadline.ms
    return {**learnt, **options}


def _learnt(section: Mapping[str, Any], role: str) -> dict[str, Any]:
    """The planner's options that say what a worker's section of this role says."""
    if not section:
        return {}
    sizes: dict[str, Any] = sizes_of(section)
    if section.get(AT_ONCE) is not None:
        sizes[AT_ONCE] = section[AT_ONCE]
    same = worker_sizes(role)
    keys = {each.name: key_of(each) for each in fields(PlannerSettings)}
    return {keys[same[name]]: size for name, size in sizes.items() if name in same}
