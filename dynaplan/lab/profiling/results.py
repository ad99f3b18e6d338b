"""Files of a finished profile: curves in the layouts of Dynamo's profiler, pictures, a configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from dynaplan.config.overrides import Sections
from dynaplan.config.parallelism import DATA, PIPELINE, TENSOR
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.engines.timing_model.step_timing import DECODE_KEYS, PREFILL_KEYS, MeasuredProfile
from dynaplan.lab.drawing.plots import Plot, plot_svg
from dynaplan.lab.profiling.measured_config import without_options
from dynaplan.lab.profiling.measurements import Measurements
from dynaplan.lab.profiling.profile_plots import DECODE_DIRECTORY, PREFILL_DIRECTORY, plots_of
from dynaplan.lab.profiling.recommendation import Goal, Recommendation
from dynaplan.util.errors import ConfigError

HALVES = {"prefill": (PREFILL_DIRECTORY, PREFILL_KEYS), "decode": (DECODE_DIRECTORY, DECODE_KEYS)}
"""The directory and the keys of each half of a profile."""

CONFIG_FILE = "config_with_planner.yaml"
"""The name of the completed configuration."""

SIZES = (*TENSOR, *PIPELINE, *DATA)
"""Every name of a parallel size."""


def write_results(
    output_dir: Path,
    recommendation: Recommendation,
    measurements: Sequence[Measurements],
    config: Mapping[str, Mapping[str, Any]],
    *,
    splits_layers: bool = True,
) -> list[Path]:
    """Write the profile, its pictures and the completed configuration; return the files.

    ``config`` is the user's; ``splits_layers`` is true when the profiler chose the tensor parallel sizes.
    Raises ConfigError when it cannot write.
    """
    directory = output_dir.absolute()
    sections = with_recommendation(config, recommendation, str(directory), splits_layers)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        written = write_points(directory, recommendation.profile)
        written.append(write_config(directory, sections, recommendation.goal))
        written += write_plots(directory, plots_of(recommendation, measurements))
    except OSError as error:
        raise ConfigError(
            f"--output-dir: {output_dir} cannot be written: {error}", hint="Expected a directory of yours."
        ) from error
    return written


def write_points(directory: Path, profile: MeasuredProfile) -> list[Path]:
    """Write both halves, each as ``raw_data.npz`` and as JSON; return the files. Raises OSError.

    Keys and units are those of ``MeasuredProfile``; ``max_kv_tokens`` is an array of one in the archive, and
    so is ``origin``, which measurements do not have.
    """
    import numpy  # only for archives: it costs 30 MiB and 0.1 s

    written = []
    for half, (folder, keys) in HALVES.items():
        values: dict[str, Any] = {key: getattr(profile, key) for key in keys}
        if profile.origin:
            values["origin"] = profile.origin
        archive = directory / folder / "raw_data.npz"
        archive.parent.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = {key: numpy.atleast_1d(value) for key, value in values.items()}
        numpy.savez(archive, **arrays)
        document = directory / f"{half}_raw_data.json"
        document.write_text(json.dumps(values) + "\n")
        written += [archive, document]
    return written


def write_plots(directory: Path, plots: Mapping[str, Plot]) -> list[Path]:
    """Write the plots as SVG, each below the directory at its name; return the files. Raises OSError."""
    written = []
    for name, plot in plots.items():
        path = directory / f"{name}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(plot_svg(plot), encoding="utf-8")
        written.append(path)
    return written


def write_config(directory: Path, sections: Mapping[str, Mapping[str, Any]], goal: Goal) -> Path:
    """Write a configuration that ``dynaplan serve -f`` takes; return the file. Raises OSError."""
    import yaml

    path = directory / CONFIG_FILE
    body = yaml.safe_dump(dict(sections), sort_keys=False, allow_unicode=True)
    path.write_text(_HEAD.format(goal=goal) + body, encoding="utf-8")
    return path


_HEAD = """\
# What profile-sla recommends for prompts of {goal.isl_tokens} and answers of {goal.osl_tokens} tokens, \
TTFT {goal.ttft_ms:g} ms, ITL {goal.itl_ms:g} ms.
# Planner.policy says what counts: `load` the thresholds, `sla` targets and profile, `both` all of them.
"""


def with_recommendation(
    config: Mapping[str, Mapping[str, Any]],
    recommendation: Recommendation,
    profile_results_dir: str,
    splits_layers: bool,
) -> Sections:
    """The configuration with targets, thresholds, profile and GPUs of a worker; ``config`` stays as it is.

    The policy is ``sla``, unless the Planner has one of its own. With ``splits_layers`` the workers get the
    tensor parallel sizes that were chosen, and as many GPUs; without, the engine has no such size and the
    workers stay as they are.
    """
    sections: Sections = deepcopy({name: dict(section) for name, section in config.items()})
    planner = sections.get("Planner", {})
    planned = {"policy": "sla", **planner}
    sections["Planner"] = _merged(planned, _planner_options(recommendation, profile_results_dir))
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
            sections["Common"] = without_options(sections["Common"], SIZES)
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
    sized = without_options(section, SIZES)
    sized["tensor-parallel-size"] = tensor_parallel_size
    arguments = dict(sized.pop("ServiceArgs", None) or {})
    arguments["resources"] = {**(arguments.get("resources") or {}), "gpu": gpus}
    return {**sized, "ServiceArgs": arguments}


def _merged(section: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The section with these options, each under one spelling only."""
    return {**without_options(section, changes), **changes}
