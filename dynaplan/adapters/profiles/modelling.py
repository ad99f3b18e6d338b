"""From a measured profile to what the SLA policy plans with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dynaplan.adapters.engines.profiles import timing_for
from dynaplan.adapters.profiles.opening import open_profile
from dynaplan.adapters.profiles.tables import tables_of
from dynaplan.core.engine_settings import SimOptions
from dynaplan.core.sla.formula import Formula
from dynaplan.core.sla.predicting import Deployment
from dynaplan.core.sla.targeting import SlaModel
from dynaplan.core.sla.workload import WorkerKind
from dynaplan.core.step_timing import FITTED
from dynaplan.domain.planner_settings import PlannerSettings

WITHOUT_POINTS = ("mocker", *FITTED)
"""Profiles that are a formula: there is nothing to interpolate between."""


def model_of(settings: PlannerSettings, engine: Mapping[str, Any], router: str) -> SlaModel:
    """The model of a deployment whose engines are as ``profile-results-dir`` and their options say.

    ``engine`` are options that the simulated engine has too (``max-num-seqs`` ...). Raises ConfigError.
    """
    decode = _kind(settings, engine, settings.decode_engine_num_gpu)
    prefill = _kind(settings, engine, settings.prefill_engine_num_gpu)
    deployment = Deployment(decode, prefill, is_evenly_routed=router == "round-robin")
    return SlaModel(deployment, _formula(settings) if settings.sizing == "formula" else None)


def _kind(settings: PlannerSettings, engine: Mapping[str, Any], gpus: int) -> WorkerKind:
    name = settings.profile_results_dir
    if name in WITHOUT_POINTS:
        options = SimOptions.from_options({**engine, "profile": name})
        timing, kv_tokens = timing_for(options)
        return WorkerKind(timing.sped_up(options.speedup_ratio), options.settings(kv_tokens))
    profile = open_profile(name, gpus)
    options = SimOptions.from_options({**engine, "profile": None})
    fitting = replace(options, context_tokens=min(options.context_tokens, profile.max_kv_tokens))
    timing = profile.timing().sped_up(options.speedup_ratio)
    return WorkerKind(timing, fitting.settings(profile.max_kv_tokens))


def _formula(settings: PlannerSettings) -> Formula:
    name = settings.profile_results_dir
    prefill, decode = (
        tables_of(open_profile(name, gpus), name)
        for gpus in (settings.prefill_engine_num_gpu, settings.decode_engine_num_gpu)
    )
    return Formula.of(prefill, decode)
