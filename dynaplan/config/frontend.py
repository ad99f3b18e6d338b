"""The Frontend's settings, gathered from the sections that Dynamo spreads them over.

The deadline of queued prompts is one that a section sets, or else the target that the Planner plans for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dynaplan.config.model_entries import planned_models, served_models
from dynaplan.config.service_config import COMMON, SERVICE_ARGS, ServiceConfig, kebab_keys, section_options
from dynaplan.config.settings.fields import kebab
from dynaplan.config.settings.frontend import (
    DECODE_COMPONENT,
    DisaggregationSettings,
    FrontendSettings,
    part_of_limit,
)
from dynaplan.config.settings.models import ServedModel
from dynaplan.config.settings.planner import PlannerSettings

log = logging.getLogger(__name__)


DEADLINE = "prefill-deadline"

DEADLINE_OPTIONS = ("policy", "ttft", DEADLINE)
"""Options of the Planner that frontends read where no section of theirs sets a deadline."""


class PrefillDeadline(NamedTuple):
    """Milliseconds after its arrival that a queued prompt is dispatched by; 0: in the order of arrival.

    ``origin`` is the option that says it; empty where none does.
    """

    ms: float = 0.0
    origin: str = ""

    def __str__(self) -> str:
        """Return the order in words, for a person."""
        return f"by deadline, {self.ms:g} ms ({self.origin})" if self.ms else "in the order of arrival"


def prefill_deadline(said: DisaggregationSettings, planner: Mapping[str, Any]) -> PrefillDeadline:
    """Return the deadline that holds: what is ``said``, else the target of the Planner with these options.

    Only a planner that plans for targets has one, and only prompts for prefill workers are queued. Raises
    ConfigError.
    """
    if said.prefill_deadline_ms is not None:
        return PrefillDeadline(said.prefill_deadline_ms, DEADLINE)
    if not said.is_on:
        return PrefillDeadline()
    plan = _planner_settings(planner, DEADLINE_OPTIONS)
    if plan.prefill_deadline_ms is not None:
        return PrefillDeadline(plan.prefill_deadline_ms, f"Planner.{DEADLINE}")
    return PrefillDeadline(plan.ttft_ms, "Planner.ttft") if plan.is_by_targets else PrefillDeadline()


SECTIONS = ("Frontend", "Router", "Processor", DECODE_COMPONENT)
"""The sections with options of a Frontend, the strongest first."""

TARGET_OPTIONS = ("policy", "ttft", "itl")
"""Options of the Planner that say what it promises: frontends count the requests that missed it."""

NAMES = ("served-model-name", "model")
"""Options that name the model, the stronger first; the Frontend reads them of Common unasked."""


AUTO = "auto"
"""In the place of the number of frontends: as many as the GPUs call for (``frontends_for``)."""

GPUS_OF_A_FRONTEND = 2
"""GPUs for which ``auto`` has one frontend.

A frontend passes 43,000 tokens/s on a core of its own (64 streams of 512 tokens, docs/benchmarks.md). An H200
decodes 13,400 tokens/s of an 8B model in FP8 at an ITL of 20 ms: two of them keep it at 62 %.
"""


def frontends_for(gpus: int, cores: int | None = None) -> int:
    """Return how many frontends ``auto`` means: by the GPUs, at least one, at most half of the cores."""
    wanted = -(-gpus // GPUS_OF_A_FRONTEND)
    return max(1, wanted if cores is None else min(wanted, cores // 2))


def read_settings(
    sections: Sequence[tuple[str, Mapping[str, Any]]],
    environment: Mapping[str, str],
    frontends: int = 1,
    planner: Mapping[str, Any] | None = None,
) -> FrontendSettings:
    """Return the settings by these sections, the first the strongest, and the environment. ConfigError.

    ``planner`` is the Planner's section, which may know the deadline of queued prompts; without it the
    deadline is as a section says, or None. The limits of waiting requests and of bodies are those of all
    ``frontends`` on the port together: each has an equal part, rounded up, and room for one body at least.
    """
    options: dict[str, Any] = {}
    places: dict[str, str] = {}
    for name, section in reversed(sections):
        given = {key: value for key, value in section.items() if value is not None}
        options |= {kebab(key): value for key, value in given.items()}
        places |= {kebab(key): f"{name}.{key}" for key in given}
    settings = FrontendSettings.from_options(options, places)
    disaggregation = DisaggregationSettings.from_options(options, places)
    if planner is not None:
        deadline_ms = prefill_deadline(disaggregation, planner).ms
        disaggregation = replace(disaggregation, prefill_deadline_ms=deadline_ms)
    runtime_dir = environment.get("DYNAPLAN_RUNTIME_DIR")
    return replace(
        settings,
        disaggregation=disaggregation,
        host=environment.get("DYNAMO_HOST") or settings.host,
        port=int(environment.get("DYNAMO_PORT") or settings.port),
        api_key=environment.get("DYNAPLAN_API_KEY") or settings.api_key,
        model=next((str(options[key]) for key in NAMES if options.get(key)), ""),
        max_waiting_requests=-(-settings.max_waiting_requests // frontends),
        max_bodies_bytes=max(
            -(-settings.max_bodies_bytes // frontends),
            min(settings.max_bodies_bytes, settings.max_body_bytes),
        ),
        frontends=frontends,
        shared_metrics=f"{runtime_dir}/frontend-metrics" if runtime_dir and frontends > 1 else None,
    )


def configured_deadline(
    config: Mapping[str, Mapping[str, Any]], planner: Mapping[str, Any]
) -> PrefillDeadline:
    """Return the deadline by which frontends dispatch queued prompts; raises ConfigError.

    ``planner`` are the options of its Planner.
    """
    return prefill_deadline(configured_disaggregation(config), planner)


def configured_disaggregation(config: Mapping[str, Mapping[str, Any]]) -> DisaggregationSettings:
    """Return where frontends of this configuration have prompts computed; raises ConfigError."""
    said: dict[str, Any] = {}
    for name in reversed(SECTIONS):
        said |= {key: value for key, value in section_options(config, name).items() if value is not None}
    return DisaggregationSettings.from_options(said)


def routes_by_events(own: Mapping[str, Any]) -> bool:
    """Tell whether frontends route by engines' KV events; ``own`` is the asking worker's section.

    The other sections are those of this process's ``ServiceConfig``.
    """
    config = ServiceConfig.get_instance()
    sections = [(name, config.get_parsed_config(name)) for name in SECTIONS]
    settings = read_settings([*sections, ("this worker", own)], {})
    return settings.router == "kv" and settings.kv_events


def uses_events(config: Mapping[str, Mapping[str, Any]]) -> bool:
    """Tell whether frontends of this configuration follow engines' KV events, or each other's bookings."""
    settings = read_settings([(name, section_options(config, name)) for name in SECTIONS], {})
    return (settings.router == "kv" and settings.kv_events) or settings.router_replica_sync


def own_frontend_settings(own: Mapping[str, Any]) -> FrontendSettings:
    """Return a frontend's settings: from its own section, else from those of Router, Processor and worker."""
    config = ServiceConfig.get_instance()
    sections = [(name, config.get_parsed_config(name)) for name in SECTIONS[1:]]
    common = {key: value for key, value in (config.get(COMMON) or {}).items() if kebab(key) in NAMES}
    frontends = int(((config.get(SECTIONS[0]) or {}).get(SERVICE_ARGS) or {}).get("workers") or 1)
    planner = config.get_parsed_config(PlannerSettings.SECTION)
    gathered = [(SECTIONS[0], own), *sections, (COMMON, common)]
    settings = read_settings(gathered, os.environ, frontends, planner)
    if settings.disaggregation.is_on:
        log.info(
            "queued prompts are computed %s", configured_deadline({**config, SECTIONS[0]: dict(own)}, planner)
        )
    models, planners = served_models(config), planned_models(config)
    by_model = {name: promised_times(own) for name, own in planners.items()}
    return replace(
        settings,
        disaggregation_by_model={
            each.name: disaggregation_settings_of(each, config, planners.get(each.name, {}))
            for each in models
            if each.prefill
        },
        promised_ms=None if models else promised_times(planner),
        promised_ms_by_model={name: promised for name, promised in by_model.items() if promised},
        models=tuple(_part_of_limit(each, frontends) for each in models),
        worker_options={
            component: {**common, **config.get_parsed_config(component)}
            for component in [each.component for each in models] or [settings.decode_component]
        },
    )


def _part_of_limit(model: ServedModel, frontends: int) -> ServedModel:
    """Return the model with one frontend's part of its ``concurrency-limit``."""
    limit = model.settings.concurrency_limit
    part = part_of_limit(limit, frontends) if limit else None
    return replace(model, settings=replace(model.settings, concurrency_limit=part))


def disaggregation_settings_of(
    model: ServedModel, config: Mapping[str, Mapping[str, Any]], planner: Mapping[str, Any]
) -> DisaggregationSettings:
    """Return where prompts of a model are prefilled: by its entry, else by the frontend's options.

    ``planner`` are the options of the model's planner, empty if it has none. Raises ConfigError for invalid
    options.
    """
    said: dict[str, Any] = {}
    for name in (*SECTIONS[2::-1], model.component):
        said |= {key: value for key, value in section_options(config, name).items() if value is not None}
    settings = DisaggregationSettings.from_options(said)
    return replace(settings, prefill_deadline_ms=prefill_deadline(settings, planner).ms)


def promised_times(planner: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return a Planner's targets of TTFT and ITL, in ms; None when its policy does not plan for targets.

    Raises ConfigError.
    """
    plan = _planner_settings(planner, TARGET_OPTIONS)
    return (plan.ttft_ms, plan.itl_ms) if plan.is_by_targets else None


def _planner_settings(planner: Mapping[str, Any], names: Sequence[str]) -> PlannerSettings:
    """Return the settings that the options of these names make: a Frontend reads no others of a Planner."""
    given = kebab_keys(planner)
    return PlannerSettings.from_options({name: given[name] for name in names if name in given})
