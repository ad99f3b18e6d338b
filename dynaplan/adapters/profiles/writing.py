"""Writes a profile in the layouts of Dynamo's profiler, and the configuration that goes with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynaplan.adapters.engines.sim.profiles import DECODE_KEYS, PREFILL_KEYS
from dynaplan.core.engine.timing import MeasuredProfile
from dynaplan.core.profiling.selection import Goal

HALVES = {"prefill": PREFILL_KEYS, "decode": DECODE_KEYS}

CONFIG_FILE = "config_with_planner.yaml"


def selected_dir(directory: Path, half: str) -> Path:
    """Where the measured points of the chosen size are, and their pictures."""
    return directory / f"selected_{half}_interpolation"


def write_points(directory: Path, profile: MeasuredProfile) -> list[Path]:
    """Both halves, each as ``raw_data.npz`` and as JSON; returns the files. Raises OSError.

    Keys and units are those of ``MeasuredProfile``; ``max_kv_tokens`` is an array of one in the archive.
    """
    import numpy  # only for archives: it costs 30 MiB and 0.1 s

    written = []
    for half, keys in HALVES.items():
        values: dict[str, Any] = {key: getattr(profile, key) for key in keys}
        archive = selected_dir(directory, half) / "raw_data.npz"
        archive.parent.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = {key: numpy.atleast_1d(value) for key, value in values.items()}
        numpy.savez(archive, **arrays)
        document = directory / f"{half}_raw_data.json"
        document.write_text(json.dumps(values) + "\n")
        written += [archive, document]
    return written


def write_config(directory: Path, sections: Mapping[str, Mapping[str, Any]], goal: Goal) -> Path:
    """A configuration that ``dynaplan serve -f`` takes; returns the file. Raises OSError."""
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
