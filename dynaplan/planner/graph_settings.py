"""What the configuration of the graph tells the planner about the workers that it sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from dynaplan import wiring
from dynaplan.domain.settings.fields import option_name
from dynaplan.domain.settings.planner import DECODE_SIZES, PREFILL_SIZES, PlannerSettings
from dynaplan.options.service_config import ServiceConfig, kebab_keys

ROUTED_BY = ("Frontend", "Router", "Processor", "VllmWorker")
"""Where a Frontend looks for routing and disaggregation, the strongest first."""

AT_ONCE = "max-concurrent-prefills"

OPTIONS = {each.name: option_name(each) for each in fields(PlannerSettings)}


def with_deployed(given: Mapping[str, Any], config: ServiceConfig) -> dict[str, Any]:
    """The planner's options, and where they do not say it, what the options of the other services say.

    Nothing is learnt of a service that the configuration does not have.
    """
    options = {key: value for key, value in kebab_keys(given).items() if value is not None}
    decode = _section(config, options.get("decode-component") or PlannerSettings.decode_component)
    prefill = _section(config, options.get("prefill-component") or PlannerSettings.prefill_component)
    learnt = {**_sizes(decode, DECODE_SIZES), **_sizes(prefill, PREFILL_SIZES)}
    if prefill.get(AT_ONCE) is not None:
        learnt[OPTIONS[PREFILL_SIZES[AT_ONCE]]] = prefill[AT_ONCE]
    routers = (_section(config, name).get("router") for name in ROUTED_BY)
    router = next((str(each) for each in routers if each is not None), None)
    if router:
        learnt["router"] = router.replace("_", "-")
    return learnt | options


def _section(config: ServiceConfig, name: str) -> dict[str, Any]:
    return kebab_keys(config.get_parsed_config(name))


def _sizes(section: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    if not section:
        return {}
    sizes = wiring.engine_sizes(str(section.get("engine") or "sim"), section)
    return {OPTIONS[names[name]]: size for name, size in sizes.items() if name in names}
