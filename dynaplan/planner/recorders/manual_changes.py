"""``by_hand.jsonl``: the changes that persons make by commands, one line each.

It stands in a deployment's log directory, beside the planners' ``decisions.jsonl``. Who reads both has the
cause of every change of the fleet: ``why``, ``status``, the page. A command writes its line when the store
has what it asks for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dynaplan.planner.recorders.decision_log import TAIL_BYTES, AppendingFile
from dynaplan.util.documents import number_field, object_field, parse_object, text_field, whole_field

FILE_NAME = "by_hand.jsonl"


@dataclass(frozen=True)
class ManualChange:
    """What a person has changed ``at_unix_s``, the name of the user, and ``what`` in words.

    ``before`` and ``after`` are the desired counts that a ``scale`` has changed, by role; a hold, its end, a
    GPU or a model are in the words. ``decision_id`` is that of the counts, 0 without any.
    """

    at_unix_s: float
    by: str
    what: str
    before: Mapping[str, int] = field(default_factory=dict)
    after: Mapping[str, int] = field(default_factory=dict)
    decision_id: int = 0

    def __str__(self) -> str:
        """Say what was changed, and by whom: ``by hand (alice): decode 4 -> 2``."""
        return f"by hand ({self.by}): {self.what}"


def record_manual_change(log_dir: Path, change: ManualChange) -> None:
    """Append a line; where that cannot be written it is logged, and the change stands without it."""
    file = AppendingFile(lambda: log_dir / FILE_NAME)
    file.append(json.dumps(asdict(change), separators=(",", ":")).encode() + b"\n")
    file.close()


def manual_changes(log_dir: Path, last: int, since_s: float = 0.0) -> list[ManualChange]:
    """Return the last changes since that moment, oldest first; what cannot be read is left out."""
    try:
        with (log_dir / FILE_NAME).open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    read = (_read(line) for line in lines)
    return [each for each in read if each and each.at_unix_s >= since_s][-last:]


def _read(line: bytes) -> ManualChange | None:
    try:
        document = parse_object(line)
        return ManualChange(
            number_field(document, "at_unix_s"),
            text_field(document, "by"),
            text_field(document, "what"),
            _counts(document, "before"),
            _counts(document, "after"),
            whole_field(document, "decision_id", 0),
        )
    except ValueError:
        return None


def _counts(document: Mapping[str, Any], name: str) -> dict[str, int]:
    counts = object_field(document, name, {})
    return {role: whole_field(counts, role) for role in counts}
