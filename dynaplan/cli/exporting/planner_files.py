"""Files of a planner in a cluster: its profile, and the history that its forecasts begin with."""

from __future__ import annotations

import gzip
import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynaplan import wiring
from dynaplan.core.manifests.pods import PLANNER_DIRECTORY
from dynaplan.domain.errors import ConfigError
from dynaplan.domain.settings.forecasting import HISTORY_INTERVALS
from dynaplan.domain.settings.planner import PlannerSettings

PROFILE_SUFFIXES = (".npz", ".json")
"""Files of a profile that are read; plots and reports beside them are not."""

MEMORY = ("state", "next_state")
"""The fields of a decision's record that forecasts do not use."""

MOST_HISTORY_BYTES = 400 * 1024
"""The part of a ConfigMap of 1 MiB that the history may take, before it is written in base64."""


@dataclass
class PlannerFiles:
    """Files by their paths below the planner's directory, and the options that name them there."""

    contents: dict[str, bytes] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)


def planner_files(settings: PlannerSettings, log_dir: Path | None) -> PlannerFiles:
    """Read what the planner needs with these settings; ``log_dir`` is where decisions of before were written.

    Nothing is needed by a planner without targets. A profile that is shipped is in the image, too.
    """
    files = PlannerFiles()
    if not settings.is_by_targets:
        return files
    _add_profile(files, Path(settings.profile_results_dir).expanduser())
    trace = settings.load_predictor_warmup_trace
    if trace and Path(trace).expanduser().is_file():
        _add_history(files, "trace.gz", gzip.compress(_read(Path(trace).expanduser()), mtime=0))
    elif not trace and log_dir and (records := _decisions(log_dir)):
        _add_history(files, "decisions.jsonl.gz", history(records))
    return files


def history(records: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the newest decisions as gzipped JSON lines: what forecasts use, as far as there is room.

    The planner's memory, which is most of a record, is no traffic.
    """
    traffic = ({name: each[name] for name in each if name not in MEMORY} for each in records)
    lines = deque((json.dumps(each, separators=(",", ":")) for each in traffic), maxlen=HISTORY_INTERVALS)
    while len(packed := gzip.compress("\n".join(lines).encode(), mtime=0)) > MOST_HISTORY_BYTES:
        for _ in range(len(lines) // 2):
            lines.popleft()
    return packed


def _decisions(log_dir: Path) -> list[dict[str, Any]]:
    """Return the newest planner's decisions with measured traffic; none where it has not decided yet."""
    try:
        records = [record for _, record in wiring.planning.recorded_decisions(log_dir)]
    except ConfigError:
        return []
    return [each for each in records if (each.get("observation") or {}).get("traffic")]


def _add_profile(files: PlannerFiles, path: Path) -> None:
    found = (
        [path]
        if path.is_file()
        else [each for each in sorted(path.rglob("*")) if each.suffix in PROFILE_SUFFIXES and each.is_file()]
    )
    for each in found:
        below = path.name if each == path else each.relative_to(path).as_posix()
        files.contents[f"profile/{below}"] = _read(each)
    if found:
        last = path.name if path.is_file() else ""
        files.options["profile-results-dir"] = f"{PLANNER_DIRECTORY}/profile/{last}".rstrip("/")


def _add_history(files: PlannerFiles, name: str, content: bytes) -> None:
    files.contents[f"history/{name}"] = content
    files.options["load-predictor-warmup-trace"] = f"{PLANNER_DIRECTORY}/history/{name}"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint="Expected a file.") from error
