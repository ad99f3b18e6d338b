"""The model that the SLA policy plans with, made of a measured profile and the engines' options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dynaplan.config.settings.planner import PlannerSettings, worker_sizes
from dynaplan.config.settings.worker import SimOptions, WorkerSettings
from dynaplan.engines.sim.profiles import timing_for
from dynaplan.engines.timing_model.model import EngineSettings
from dynaplan.engines.timing_model.timing import FITTED
from dynaplan.planner.profiles.lookup import open_profile
from dynaplan.planner.profiles.tables import tables_of
from dynaplan.planner.rules.sla_policy import SlaModel
from dynaplan.planner.sizing.formula import Formula
from dynaplan.planner.sizing.queueing.queueing_model import ServiceModel
from dynaplan.planner.sizing.queueing.workload import WorkerKind

WITHOUT_POINTS = ("mocker", *FITTED)
"""Profiles that are formulas: they have no points to interpolate between."""


def model_of(
    settings: PlannerSettings, engine: Mapping[str, Any], router: str, prefill_engine: Mapping[str, Any]
) -> SlaModel:
    """Return the model of a deployment with the profile that ``profile-results-dir`` names.

    ``engine`` are the options of the decode workers, by the simulated engine's names (``max-num-seqs`` ...),
    ``prefill_engine`` those of the prefill workers. The planner's settings override both. Raises
    ConfigError.
    """
    decode_sizes = worker_sizes("decode")
    engine = _overridden(engine, settings, decode_sizes)
    prefill_sizes = {**worker_sizes("prefill"), "max-model-len": decode_sizes["max-model-len"]}
    prefill_engine = _overridden(prefill_engine, settings, prefill_sizes)
    router = settings.router or router
    decode = _kind(settings, engine, settings.decode_engine_num_gpu)
    prefill = _kind(settings, prefill_engine, settings.prefill_engine_num_gpu)
    at_once = WorkerSettings.from_options(prefill_engine).max_concurrent_prefills
    prefill = replace(prefill, concurrent_prefills=at_once)
    service = ServiceModel(decode, prefill, is_evenly_routed=router == "round-robin")
    formula = _formula(settings) if settings.sizing == "formula" else None
    return SlaModel(service, formula, _origin(settings))


def _kind(settings: PlannerSettings, engine: Mapping[str, Any], gpus: int) -> WorkerKind:
    name = settings.profile_results_dir
    if name in WITHOUT_POINTS:
        options = SimOptions.from_options({**engine, "profile": name})
        timing, kv_tokens = timing_for(options)
    else:
        profile = open_profile(name, gpus)
        options = SimOptions.from_options({**engine, "profile": None})
        timing, kv_tokens = profile.timing(), profile.max_kv_tokens
    held = EngineSettings.of(replace(options, context_tokens=0), kv_tokens)
    longest = min(options.context_tokens or held.context_tokens, held.total_blocks * held.block_tokens)
    return WorkerKind(timing.with_speedup(options.speedup_ratio), replace(held, context_tokens=longest))


def _origin(settings: PlannerSettings) -> str:
    name = settings.profile_results_dir
    return "" if name in WITHOUT_POINTS else open_profile(name, settings.decode_engine_num_gpu).origin


def _overridden(
    engine: Mapping[str, Any], settings: PlannerSettings, names: Mapping[str, str]
) -> dict[str, Any]:
    """The engine's options, overridden by the planner's settings."""
    overrides = {option: getattr(settings, name) for option, name in names.items()}
    options = {**engine, **{option: value for option, value in overrides.items() if value is not None}}
    step_tokens = overrides["max-num-batched-tokens"]
    if step_tokens and options.get("max-num-seqs") is None:
        options["max-num-seqs"] = min(step_tokens, SimOptions.request_slots)  # more do not fit into a step
    return options


def _formula(settings: PlannerSettings) -> Formula:
    name = settings.profile_results_dir
    prefill, decode = (
        tables_of(open_profile(name, gpus), name)
        for gpus in (settings.prefill_engine_num_gpu, settings.decode_engine_num_gpu)
    )
    return Formula.from_tables(prefill, decode)
