"""The Frontend's settings, gathered from the sections that the original spreads them over."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dynaplan.domain.settings.fields import kebab
from dynaplan.domain.settings.frontend import FrontendSettings
from dynaplan.domain.settings.routing import DECODE_COMPONENT, DisaggregationSettings
from dynaplan.options.service_config import COMMON, SERVICE_ARGS, ServiceConfig

SECTIONS = ("Frontend", "Router", "Processor", DECODE_COMPONENT)
"""The sections with options of a Frontend, the strongest first."""

NAMES = ("served-model-name", "model")
"""Options that name the model, the stronger first; the Frontend reads them of Common unasked."""


def read_settings(
    sections: Sequence[tuple[str, Mapping[str, Any]]], environment: Mapping[str, str], frontends: int = 1
) -> FrontendSettings:
    """The settings from these sections, the first the strongest, and the environment; ConfigError."""
    options: dict[str, Any] = {}
    places: dict[str, str] = {}
    for name, section in reversed(sections):
        given = {key: value for key, value in section.items() if value is not None}
        options |= {kebab(key): value for key, value in given.items()}
        places |= {kebab(key): f"{name}.{key}" for key in given}
    settings = FrontendSettings.from_options(options, places)
    runtime_dir = environment.get("DYNAPLAN_RUNTIME_DIR")
    return replace(
        settings,
        disaggregation=DisaggregationSettings.from_options(options, places),
        host=environment.get("DYNAMO_HOST") or settings.host,
        port=int(environment.get("DYNAMO_PORT") or settings.port),
        api_key=environment.get("DYNAPLAN_API_KEY") or settings.api_key,
        model=next((str(options[key]) for key in NAMES if options.get(key)), ""),
        shared_metrics=f"{runtime_dir}/frontend-metrics" if runtime_dir and frontends > 1 else None,
    )


def routes_by_events(own: Mapping[str, Any]) -> bool:
    """Tell a worker with this section whether frontends route by the KV blocks that engines say they hold."""
    config = ServiceConfig.get_instance()
    sections = [(name, config.get_parsed_config(name)) for name in SECTIONS]
    settings = read_settings([*sections, ("this worker", own)], {})
    return settings.router == "kv" and settings.kv_events


def gathered_settings(own: Mapping[str, Any]) -> FrontendSettings:
    """The settings of this process: its own section first, then those of Router, Processor and the worker."""
    config = ServiceConfig.get_instance()
    sections = [(name, config.get_parsed_config(name)) for name in SECTIONS[1:]]
    common = {key: value for key, value in (config.get(COMMON) or {}).items() if kebab(key) in NAMES}
    frontends = ((config.get(SECTIONS[0]) or {}).get(SERVICE_ARGS) or {}).get("workers") or 1
    return read_settings([(SECTIONS[0], own), *sections, (COMMON, common)], os.environ, frontends)
