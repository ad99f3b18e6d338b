"""The model that the SLA policy plans with, made of a measured profile and the engines' options.

For ``sizing: formula`` the profile's scattered points are interpolated as Dynamo 0.7 to 1.2 does it:
scipy's ``interp1d(kind="cubic")`` for prefill, ``griddata`` for decode. It is imported for the first
table only: it costs a second and 60 MiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dynaplan.config.settings.planner import PlannerSettings, worker_sizes
from dynaplan.config.settings.worker import SimOptions, WorkerSettings
from dynaplan.engines.sim.profiles import known_profiles, load_profile, timing_for
from dynaplan.engines.timing_model.engine_model import DEFAULT_CONTEXT_TOKENS, EngineSettings
from dynaplan.engines.timing_model.learnt_timing import UNKNOWN_MACHINE, LearntTiming
from dynaplan.engines.timing_model.step_timing import FITTED, MeasuredProfile
from dynaplan.planner.rules.sla_policy import PerformanceModel
from dynaplan.planner.sizing.formula import DecodeTable, Formula, Piece, PrefillTable, ProfileTables
from dynaplan.planner.sizing.queueing.queueing_model import QueueingModel
from dynaplan.planner.sizing.queueing.workload import WorkerKind
from dynaplan.util.errors import ConfigError

RESOLUTION = 100
"""The number of grid points in either direction of the decode table, as in the original."""


def fit_tables(profile: MeasuredProfile, name: str) -> ProfileTables:
    """The tables of a profile; takes some 50 ms, and a second more for the first one in a process.

    Raises ConfigError when scipy is not installed, or, naming the profile, when its points are too few for
    cubic interpolation.
    """
    if find_spec("scipy") is None:
        raise ConfigError(
            "sizing is 'formula', but the Python module scipy is not installed",
            hint="Run: pip install scipy. Or choose sizing: queueing, which needs no library.",
        )
    return ProfileTables(_prefill_table(profile, name), _decode_table(profile, name))


def _prefill_table(profile: MeasuredProfile, name: str) -> PrefillTable:
    """Fit cubic splines; the two outer pieces at either end are one cubic ("not-a-knot")."""
    from scipy.interpolate import CubicSpline

    points = sorted(zip(profile.prefill_isl, profile.prefill_ttft, profile.prefill_thpt_per_gpu, strict=True))
    isl_tokens, ttft_ms, tokens_per_s = (list(each) for each in zip(*points, strict=True))
    if len(set(isl_tokens)) < max(4, len(isl_tokens)):
        raise ConfigError(
            f"profile '{name}' has prefill points at the prompt lengths {isl_tokens}",
            hint="Expected at least 4, all different.",
        )
    return PrefillTable(
        tuple(isl_tokens),
        _pieces(CubicSpline(isl_tokens, ttft_ms, bc_type="not-a-knot")),
        _pieces(CubicSpline(isl_tokens, tokens_per_s, bc_type="not-a-knot")),
    )


def _pieces(spline: Any) -> tuple[Piece, ...]:
    return tuple(tuple(each) for each in spline.c.T.tolist())


def _decode_table(profile: MeasuredProfile, name: str) -> DecodeTable:
    """Interpolate by Clough-Tocher over the triangulated points; outside of them, take the nearest one."""
    import numpy
    from scipy.interpolate import CloughTocher2DInterpolator, NearestNDInterpolator
    from scipy.spatial import QhullError

    longest_tokens = max(profile.y_context_length)
    grid = numpy.meshgrid(numpy.linspace(0, 1, RESOLUTION), numpy.linspace(0, longest_tokens, RESOLUTION))
    points = numpy.column_stack((profile.x_kv_usage, profile.y_context_length))
    values = numpy.column_stack((profile.z_itl, profile.z_thpt_per_gpu))
    try:
        inside = CloughTocher2DInterpolator(points, values)(*grid)
    except (QhullError, ValueError) as error:
        raise ConfigError(
            f"profile '{name}' has decode points that span no area",
            hint="Expected several KV usages at each of at least two contexts.",
        ) from error
    filled = numpy.where(numpy.isnan(inside), NearestNDInterpolator(points, values)(*grid), inside)
    itl_ms, tokens_per_s = (tuple(map(tuple, filled[:, :, column].tolist())) for column in (0, 1))
    return DecodeTable(longest_tokens, profile.max_kv_tokens, itl_ms, tokens_per_s)


PRE_SWEPT = "use-pre-swept-results:"
"""The beginning of Dynamo's names of pre-swept profiles."""

_PARTS = "gpu_type:model:framework:framework_version:tp:dp:pp:block_size:max_batch_size:gpu_count"


def open_profile(profile_results_dir: str, tensor_parallel_size: int = 1) -> MeasuredProfile:
    """The profile that ``profile-results-dir`` names; raises ConfigError when there is none.

    A directory in one of the layouts of Dynamo's profiler, a JSON file, the name of a shipped profile, or
    ``use-pre-swept-results:`` and the ten values of a pre-swept configuration.
    """
    name = profile_results_dir
    if name.startswith(PRE_SWEPT):
        name, tensor_parallel_size = _pre_swept(name)
    try:
        return load_profile(name, tensor_parallel_size)
    except ConfigError as error:
        raise ConfigError(
            f"profile-results-dir is '{profile_results_dir}': {error.args[0]}",
            hint="Leave it out: the planner learns the engine while it serves. Or measure a profile before: "
            "`dynaplan profile-sla -f FILE`, with the file and options of serve. For simulated engines: "
            f"{', '.join(known_profiles())}.",
        ) from error


def _pre_swept(name: str) -> tuple[str, int]:
    """Split ``use-pre-swept-results:...`` into a shipped profile's name and its tensor parallel size.

    Raises ConfigError for any other form.
    """
    parts = name.removeprefix(PRE_SWEPT).split(":")
    if len(parts) != len(_PARTS.split(":")) or not parts[4].isdecimal():
        raise ConfigError(f"profile-results-dir is '{name}'", hint=f"Expected {PRE_SWEPT}{_PARTS}.")
    return f"{parts[0]}-{parts[1].rpartition('/')[2]}", int(parts[4])


LEARNT = "learnt"
"""The value of ``profile-results-dir`` that asks for no profile: the engines' steps are learnt."""


def has_profile(settings: PlannerSettings) -> bool:
    """Tell whether a profile says the time of a step; false where none was named, and none is here."""
    name = settings.profile_results_dir
    if name == PlannerSettings.profile_results_dir:
        return Path(name).exists() or settings.sizing == "formula"
    return name != LEARNT


FORMULA_HINT = "Expected a profile in profile-results-dir. Or choose sizing: queueing, which needs none."

WITHOUT_POINTS = ("mocker", *FITTED)
"""Profiles that are formulas: they have no points to interpolate between."""


def build_sla_model(
    settings: PlannerSettings,
    engine: Mapping[str, Any] | None = None,
    router: str = "round-robin",
    *,
    prefill_engine: Mapping[str, Any] | None = None,
) -> PerformanceModel:
    """Return the model of a deployment with the profile that ``profile-results-dir`` names.

    ``engine`` are the options of the decode workers, by the simulated engine's names (``max-num-seqs`` ...),
    ``prefill_engine`` those of the prefill workers where they differ. The planner's settings override both.
    Raises ConfigError.
    """
    engine = engine or {}
    prefill_engine = engine if prefill_engine is None else prefill_engine
    decode_sizes = worker_sizes("decode")
    engine = _override(engine, settings, decode_sizes)
    prefill_sizes = {**worker_sizes("prefill"), "max-model-len": decode_sizes["max-model-len"]}
    prefill_engine = _override(prefill_engine, settings, prefill_sizes)
    router = settings.router or router
    decode = _worker_kind(settings, engine, settings.decode_engine_num_gpu)
    prefill = _worker_kind(settings, prefill_engine, settings.prefill_engine_num_gpu)
    at_once = WorkerSettings.from_options(prefill_engine).max_concurrent_prefills
    prefill = replace(prefill, concurrent_prefills=at_once)
    service = QueueingModel(decode, prefill, is_evenly_routed=router == "round-robin")
    if settings.sizing == "formula" and not has_profile(settings):
        raise ConfigError("sizing is 'formula', but there is no profile", hint=FORMULA_HINT)
    formula = _formula(settings) if settings.sizing == "formula" else None
    return PerformanceModel(service, formula, _origin(settings))


def _worker_kind(settings: PlannerSettings, engine: Mapping[str, Any], gpus: int) -> WorkerKind:
    name = settings.profile_results_dir
    if not has_profile(settings):
        options = SimOptions.from_options({**engine, "profile": None})
        timing = LearntTiming(UNKNOWN_MACHINE, UNKNOWN_MACHINE).timing()
        kv_tokens = max(options.context_tokens, DEFAULT_CONTEXT_TOKENS)  # until an engine tells its own
    elif name in WITHOUT_POINTS:
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
    if not has_profile(settings):
        return ""
    return "" if name in WITHOUT_POINTS else open_profile(name, settings.decode_engine_num_gpu).origin


def _override(
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
        fit_tables(open_profile(name, gpus), name)
        for gpus in (settings.prefill_engine_num_gpu, settings.decode_engine_num_gpu)
    )
    return Formula.from_tables(prefill, decode)
