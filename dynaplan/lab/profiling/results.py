"""Files of a finished profile: curves in the layouts of Dynamo's profiler, pictures, a configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynaplan.engines.timing_model.timing import DECODE_KEYS, PREFILL_KEYS, MeasuredProfile
from dynaplan.lab.profiling import pictures
from dynaplan.lab.profiling.measurements import Measurements
from dynaplan.lab.profiling.plots import DECODE_DIRECTORY, PREFILL_DIRECTORY, plots_of
from dynaplan.lab.profiling.recommendation import Recommendation
from dynaplan.lab.profiling.recommended_config import with_recommendation
from dynaplan.lab.profiling.selection import Goal
from dynaplan.util.errors import ConfigError

HALVES = {"prefill": (PREFILL_DIRECTORY, PREFILL_KEYS), "decode": (DECODE_DIRECTORY, DECODE_KEYS)}
"""The directory and the keys of each half of a profile."""

CONFIG_FILE = "config_with_planner.yaml"
"""The name of the completed configuration."""


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
        written += pictures.draw(directory, plots_of(recommendation, measurements))
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
