"""Files of a planner in a cluster: its profile, and the history that its forecasts begin with."""

from __future__ import annotations

import gzip
import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynaplan.config.settings.planner import HISTORY_INTERVALS, PlannerSettings
from dynaplan.planner.recorders.decision_log import read_recording
from dynaplan.util.errors import ConfigError

DIRECTORY = "/etc/dynaplan/planner"
"""Where the planner's pod has the files: ``mountPath`` of ``templates/planner.yaml``."""

PROFILE_SUFFIXES = (".npz", ".json")
"""Files of a profile that are read; plots and reports beside them are not."""

MEMORY = ("state", "next_state")
"""The fields of a decision's record that forecasts do not use: the planner's memory, most of a record."""

MOST_HISTORY_BYTES = 400 * 1024
"""The part of a ConfigMap of 1 MiB that the history may take, before it is written in base64."""


@dataclass
class PlannerFiles:
    """Files by their paths below the planner's directory, and the options that name them there."""

    contents: dict[str, bytes] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)

    def add_history(self, name: str, content: bytes) -> None:
        """Add the trace that forecasts begin with."""
        self.contents[f"history/{name}"] = content
        self.options["load-predictor-warmup-trace"] = f"{DIRECTORY}/history/{name}"


def planner_files(settings: PlannerSettings, log_dir: Path | None) -> PlannerFiles:
    """Read what the planner needs with these settings; ``log_dir`` has the decisions of earlier planners.

    Nothing is needed by a planner without targets. A profile that is shipped is in the image, too.
    """
    files = PlannerFiles()
    if not settings.is_by_targets:
        return files
    _add_profile(files, Path(settings.profile_results_dir).expanduser())
    trace = settings.load_predictor_warmup_trace
    if trace and Path(trace).expanduser().is_file():
        files.add_history("trace.gz", gzip.compress(_read(Path(trace).expanduser()), mtime=0))
    elif not trace and log_dir and (records := _decisions(log_dir)):
        files.add_history("decisions.jsonl.gz", history(records))
    return files


def history(records: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the newest decisions as gzipped JSON lines: what forecasts use, as far as there is room."""
    traffic = ({name: record[name] for name in record if name not in MEMORY} for record in records)
    lines = deque((json.dumps(each, separators=(",", ":")) for each in traffic), maxlen=HISTORY_INTERVALS)
    while len(packed := gzip.compress("\n".join(lines).encode(), mtime=0)) > MOST_HISTORY_BYTES:
        for _ in range(len(lines) // 2):
            lines.popleft()
    return packed


def _decisions(log_dir: Path) -> list[Mapping[str, Any]]:
    """Return the newest planner's decisions with measured traffic; none where it has not decided yet."""
    try:
        records = [record for _, record in read_recording(log_dir)]
    except ConfigError:
        return []
    return [record for record in records if (record.get("observation") or {}).get("traffic")]


def _add_profile(files: PlannerFiles, path: Path) -> None:
    """Add a profile of the user's: a file, or a directory with everything in it that is read."""
    below = [path] if path.is_file() else sorted(path.rglob("*"))
    found = [file for file in below if file.is_file() and (file == path or file.suffix in PROFILE_SUFFIXES)]
    root = path.parent if path.is_file() else path
    files.contents |= {f"profile/{file.relative_to(root).as_posix()}": _read(file) for file in found}
    if found:
        last = f"/{path.name}" if path.is_file() else ""
        files.options["profile-results-dir"] = f"{DIRECTORY}/profile{last}"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint="Expected a file.") from error
