"""The user's configuration, completed with what a sweep recommends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from dynaplan.config.parallelism import DATA, PIPELINE, TENSOR
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.lab.profiling.recommendation import Recommendation

Sections = dict[str, dict[str, Any]]
"""Options by service."""

SIZES = (*TENSOR, *PIPELINE, *DATA)
"""Every name of a parallel size."""


def with_recommendation(
    config: Mapping[str, Mapping[str, Any]],
    recommendation: Recommendation,
    profile_results_dir: str,
    splits_layers: bool,
) -> Sections:
    """The configuration with targets, thresholds, profile and GPUs of a worker; ``config`` stays as it is.

    The Planner's own policy stays. With ``splits_layers`` the workers get the tensor parallel sizes that
    were chosen, and as many GPUs; without, the engine has no such size and the workers stay as they are.
    """
    sections: Sections = deepcopy({name: dict(section) for name, section in config.items()})
    planner = sections.get("Planner", {})
    sections["Planner"] = _merged(planner, _planner_options(recommendation, profile_results_dir))
    if splits_layers:
        for service, choice in _workers(planner, sections, recommendation):
            sections[service] = _sized(sections.get(service, {}), *choice)
        sections["Planner"] = _merged(
            sections["Planner"],
            {
                "prefill-engine-num-gpu": recommendation.prefill.gpus,
                "decode-engine-num-gpu": recommendation.decode.gpus,
            },
        )
        if "Common" in sections:
            sections["Common"] = _without(sections["Common"], SIZES)
    return sections


def _planner_options(recommendation: Recommendation, profile_results_dir: str) -> dict[str, Any]:
    goal = recommendation.goal
    queue, kv_usage = recommendation.prefill_queue, recommendation.decode_kv
    return {
        "ttft": goal.ttft_ms,
        "itl": goal.itl_ms,
        "isl": goal.isl_tokens,
        "osl": goal.osl_tokens,
        "profile-results-dir": profile_results_dir,
        "prefill-queue-scale-up-threshold": round(queue.upper, 2),
        "prefill-queue-scale-down-threshold": round(queue.lower, 2),
        "decode-kv-scale-up-threshold": round(kv_usage.upper, 2),
        "decode-kv-scale-down-threshold": round(kv_usage.lower, 2),
    }


def _workers(
    planner: Mapping[str, Any], sections: Sections, recommendation: Recommendation
) -> Iterable[tuple[str, tuple[int, int]]]:
    """The decode service, and the prefill service where the configuration has one: (TP size, GPUs)."""
    defaults = PlannerSettings()
    named = {key.replace("_", "-"): value for key, value in planner.items()}
    decode, prefill = recommendation.decode, recommendation.prefill
    yield (
        str(named.get("decode-component") or defaults.decode_component),
        (decode.tensor_parallel_size, decode.gpus),
    )
    service = str(named.get("prefill-component") or defaults.prefill_component)
    if service in sections:
        yield service, (prefill.tensor_parallel_size, prefill.gpus)


def _sized(section: Mapping[str, Any], tensor_parallel_size: int, gpus: int) -> dict[str, Any]:
    """The worker's section with that size; pipeline and data parallelism, which were not measured, go."""
    sized = _without(section, SIZES)
    sized["tensor-parallel-size"] = tensor_parallel_size
    arguments = dict(sized.pop("ServiceArgs", None) or {})
    arguments["resources"] = {**(arguments.get("resources") or {}), "gpu": gpus}
    return {**sized, "ServiceArgs": arguments}


def _merged(section: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The section with these options, each under one spelling only."""
    return {**_without(section, changes), **changes}


def _without(section: Mapping[str, Any], options: Iterable[str]) -> dict[str, Any]:
    unwanted = frozenset(options)
    return {key: value for key, value in section.items() if key.replace("_", "-") not in unwanted}
