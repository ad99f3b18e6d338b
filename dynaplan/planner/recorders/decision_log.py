"""``decisions.jsonl``: one line for each adjustment interval, enough to decide it again.

A line whose ``state`` is the ``next_state`` of the line before leaves it out, which is nearly every line,
and so it does with the ``settings`` of the line before, but for every ``SETTINGS_EVERY``th line; readers put
them in again.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynaplan.util.errors import ConfigError

if TYPE_CHECKING:
    from dynaplan.contract.counts import Sample
    from dynaplan.planner.model import DecisionRecord

log = logging.getLogger(__name__)


class AppendingFile:
    """Appends whole chunks; when that fails (disk full, no permission), logs it once and keeps trying.

    ``name`` gives the path each time the file is opened, and ``opening`` the first bytes to write then. After
    a chunk that could be written only in part, the file is opened anew in this way.
    """

    def __init__(self, name: Callable[[], Path], opening: Callable[[], bytes] = bytes) -> None:
        self._name = name
        self._opening = opening
        self._descriptor = -1
        self._is_failing = False

    def append(self, chunk: bytes) -> bool:
        """Write the chunk, and tell whether all of it was; never raises OSError."""
        try:
            self._write(chunk)
        except OSError as error:
            self._fail(error)
            return False
        if self._is_failing:
            log.info("writing again")
        self._is_failing = False
        return True

    def close(self) -> None:
        """Close the file; the next chunk would open it again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, chunk: bytes) -> None:
        if self._descriptor < 0:
            path = self._name()
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            chunk = self._opening() + chunk
        while chunk:
            chunk = chunk[os.write(self._descriptor, chunk) :]

    def _fail(self, error: OSError) -> None:
        if not self._is_failing:
            log.warning("what the planner sees and decides is not written down: %s", error)
        self._is_failing = True
        self.close()


FILE_NAME = "decisions.jsonl"
"""The file of records in a planner's log directory."""

POINTER_NAME = "current"
"""The file, beside the log directories, that holds the path of the newest one."""

TAIL_BYTES = 1 << 20
"""The bytes at a file's end that the last records are usually found in."""


BEFORE, AFTER, SETTINGS = "state", "next_state", "settings"
"""The planner's memory before a decision and after it, and its settings: keys of ``DecisionRecord``."""

SETTINGS_EVERY = 20
"""Lines of which at least one has its settings: a reader of the last lines need not look farther back."""


class JsonLinesRecorder:
    """Appends each record to ``log_dir/decisions.jsonl``; see ``dynaplan.planner.ports.Recorder``."""

    def __init__(self, log_dir: Path) -> None:
        path = log_dir / FILE_NAME
        # The planner that wrote to it last may have been killed in the middle of a line.
        self._file = AppendingFile(lambda: path, lambda: b"\n" if path.stat().st_size else b"")
        self._written: dict[str, Any] | None = None
        self._lines_since_settings = 0

    def record_sample(self, sample: Sample) -> None:
        """Do nothing: the average of the pulls is part of the record."""

    def record_decision(self, record: DecisionRecord) -> None:
        """Append the record as one line of JSON; a disk that is full is logged and costs the line."""
        document = record.to_json()
        written = self._written or {}
        if document[BEFORE] == written.get(AFTER):
            del document[BEFORE]
        kept = {**document}
        self._lines_since_settings += 1
        if document[SETTINGS] == written.get(SETTINGS) and self._lines_since_settings < SETTINGS_EVERY:
            del document[SETTINGS]
        else:
            self._lines_since_settings = 0
        line = json.dumps(document, separators=(",", ":")).encode() + b"\n"
        self._written = kept if self._file.append(line) else None

    def close(self) -> None:
        """Close the file; another record would open it again."""
        self._file.close()


def read_records(log_dir: Path, last: int, tail_bytes: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """Read the last records in that directory, oldest first, without lines that were cut off."""
    records: list[dict[str, Any]] = []
    for line in _lines_backwards(log_dir / FILE_NAME, tail_bytes):
        if len(records) > last and any(SETTINGS in each for each in records[: len(records) - last]):
            break
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict):
            records.insert(0, document)
    whole: list[dict[str, Any]] = []
    for record in records:
        whole.append(_completed(record, whole[-1] if whole else None))
    return [record for record in whole if BEFORE in record and SETTINGS in record][-last:] if last > 0 else []


def _completed(record: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """Return the record with the state and settings that it left out, where the record before has them."""
    left_out = {BEFORE: AFTER, SETTINGS: SETTINGS}
    found = {key: before[of] for key, of in left_out.items() if before and of in before}
    return {**found, **record}


def read_all(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read every record of a ``decisions.jsonl`` with the number of its line, oldest first.

    Lines that were cut off, because a planner was killed while it wrote, are left out. Raises ConfigError for
    a file that cannot be read, or has no record.
    """
    last = None
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    document = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(document, dict):
                    last = _completed(document, last)
                    yield number, last
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint="Expected a file.") from error
    if last is None:
        raise ConfigError(f"{path} holds no decisions", hint="Expected a decisions.jsonl of a planner.")


def read_recording(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read every record of the recording that a path leads to (``find_recording``), as ``read_all``."""
    return read_all(find_recording(path))


def find_recording(path: Path) -> Path:
    """Return the ``decisions.jsonl`` of a path: itself, its directory's, or the newest planner's.

    The newest planner's is found from a deployment's log directory, from ``planner`` in it, and from the
    pointer file there. Raises ConfigError for a directory without one.
    """
    directory = path.parent if path.name == POINTER_NAME else path
    if not directory.is_dir():
        return path
    for folder in (directory, *_newest_first(directory), *_newest_first(directory / "planner")):
        if (folder / FILE_NAME).is_file():
            return folder / FILE_NAME
    raise ConfigError(
        f"{path} holds no decisions",
        hint="Expected a deployment's log directory, which `dynaplan serve` prints, or a decisions.jsonl. "
        "A planner writes one with its first decision.",
    )


def recent_records(
    planner_dir: Path, last: int, tail_bytes: int = TAIL_BYTES, since_s: float = 0.0
) -> list[dict[str, Any]]:
    """Read the last records of the planners that logged there, oldest first.

    They are the newest planner's, and when these are too few, those of the planners before it.
    ``planner_dir`` holds the pointer file, and a directory for each start of a planner. Of each file the
    last ``tail_bytes`` are searched. Records from before ``since_s``, seconds since the epoch, are left
    out: they are an earlier deployment's.
    """
    records: list[dict[str, Any]] = []
    for log_dir in _newest_first(planner_dir):
        found = read_records(log_dir, last - len(records), tail_bytes)
        own = [record for record in found if record_time_s(record) >= since_s] if since_s else found
        records = own + records
        if len(records) >= last or len(own) < len(found):
            break
    return records


def all_recent_records(planner_dir: Path, last: int, since_s: float = 0.0) -> list[dict[str, Any]]:
    """Read the last records of the planner and of those of models, which log below it, oldest first."""
    roots = [planner_dir, *sorted(path.parent for path in planner_dir.glob(f"*/{POINTER_NAME}"))]
    records = [each for root in roots for each in recent_records(root, last, since_s=since_s)]
    return sorted(records, key=record_time_s)[-last:]


def record_time_s(record: Mapping[str, Any]) -> float:
    """Return when a record was written, seconds since the epoch; minus infinity where it does not say."""
    try:
        return datetime.fromisoformat(record["wall_time"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return -math.inf


def write_pointer(planner_dir: Path, log_dir: Path) -> None:
    """Write the path of the newest planner's log directory; raises OSError when that cannot be written."""
    planner_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = planner_dir / f".{POINTER_NAME}.{os.getpid()}"
    draft.write_text(f"{log_dir.absolute()}\n", encoding="utf-8")
    draft.replace(planner_dir / POINTER_NAME)


def _newest_first(planner_dir: Path) -> Iterator[Path]:
    try:
        current = Path((planner_dir / POINTER_NAME).read_text(encoding="utf-8").strip())
    except (OSError, ValueError):
        current = None
    if current:
        yield current
    beside = sorted((path.parent for path in planner_dir.glob(f"*/{FILE_NAME}")), reverse=True)
    yield from (path for path in beside if not current or path.absolute() != current.absolute())


def _lines_backwards(path: Path, tail_bytes: int) -> list[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - tail_bytes))
            return file.read().splitlines()[::-1]
    except OSError:
        return []
