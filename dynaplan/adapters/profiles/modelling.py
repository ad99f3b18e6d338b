"""From a measured profile to what the SLA policy plans with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dynaplan.adapters.engines.sim.profiles import timing_for
from dynaplan.adapters.profiles.opening import open_profile
from dynaplan.adapters.profiles.tables import tables_of
from dynaplan.core.engine.settings import EngineSettings
from dynaplan.core.engine.timing import FITTED
from dynaplan.core.planning.sla_policy import SlaModel
from dynaplan.core.sizing.formula import Formula
from dynaplan.core.sizing.queueing_model import ServiceModel
from dynaplan.core.sizing.workload import WorkerKind
from dynaplan.domain.settings.planner import PlannerSettings, worker_sizes
from dynaplan.domain.settings.worker import SimOptions, WorkerSettings

WITHOUT_POINTS = ("mocker", *FITTED)
"""Profiles that are a formula: there is nothing to interpolate between."""


def model_of(
    settings: PlannerSettings, engine: Mapping[str, Any], router: str, prefill_engine: Mapping[str, Any]
) -> SlaModel:
    """The model of a deployment whose engines are as ``profile-results-dir`` and their options say.

    ``engine`` are options of the decode workers that the simulated engine has too (``max-num-seqs`` ...),
    ``prefill_engine`` those of the prefill workers. What the settings say of them comes first. Raises
    ConfigError.
    """
    decode_sizes = worker_sizes("decode")
    engine = _told(engine, settings, decode_sizes)
    prefill_sizes = {**worker_sizes("prefill"), "max-model-len": decode_sizes["max-model-len"]}
    prefill_engine = _told(prefill_engine, settings, prefill_sizes)
    router = settings.router or router
    decode = _kind(settings, engine, settings.decode_engine_num_gpu)
    prefill = _kind(settings, prefill_engine, settings.prefill_engine_num_gpu)
    at_once = WorkerSettings.from_options(prefill_engine).max_concurrent_prefills
    prefill = replace(prefill, concurrent_prefills=at_once)
    service = ServiceModel(decode, prefill, is_evenly_routed=router == "round-robin")
    return SlaModel(service, _formula(settings) if settings.sizing == "formula" else None)


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
    return WorkerKind(timing.sped_up(options.speedup_ratio), replace(held, context_tokens=longest))


def _told(engine: Mapping[str, Any], settings: PlannerSettings, names: Mapping[str, str]) -> dict[str, Any]:
    """The engine's options, those first that the settings say."""
    said = {option: getattr(settings, name) for option, name in names.items()}
    told = {**engine, **{option: value for option, value in said.items() if value is not None}}
    step_tokens = said["max-num-batched-tokens"]
    if step_tokens and told.get("max-num-seqs") is None:
        told["max-num-seqs"] = min(step_tokens, SimOptions.request_slots)  # more do not fit into a step
    return told


def _formula(settings: PlannerSettings) -> Formula:
    name = settings.profile_results_dir
    prefill, decode = (
        tables_of(open_profile(name, gpus), name)
        for gpus in (settings.prefill_engine_num_gpu, settings.decode_engine_num_gpu)
    )
    return Formula.from_tables(prefill, decode)
