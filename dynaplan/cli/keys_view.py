"""Who asks, by the names of keys, as ``status``, ``top``, ``why`` and the page show it: pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

COLUMNS = ("KEY", "MODEL", "RUNNING", "WAITING", "SHARE", "OF ITS LIMITS")

COLUMNS_DROPPED = ("MODEL", "OF ITS LIMITS")
"""The columns that a narrow screen does without, the first first."""

LEAST_SHARE = 0.005
"""The part of the work lately below which a key with nothing here is not worth a line."""

Row = Mapping[str, Any]
"""What a key has at a model: ``key``, ``model`` (empty for the only one), how many of its requests are
``running`` and ``waiting``, its ``share`` of the work lately, 0 to 1, and ``limits``: kind, used, limit of
each."""


def key_rows(answers: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the keys that have requests, or a share of the work lately, by the answers of all frontends.

    Each frontend has queues of its own; limits are counted by all of them together.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for answer in answers:
        for model, keys in answer.get("turns", {}).items():
            for each in keys:
                row = found.setdefault((model, each["key"]), {"key": each["key"], "model": model, **_NOTHING})
                for name in ("waiting", "running", "work"):
                    row[name] += each[name]
                row["limits"] = answer.get("limits", {}).get(each["key"]) or row["limits"]
    total = defaultdict[str, float](float)
    for row in found.values():
        total[row["model"]] += row["work"]
    for row in found.values():
        row["share"] = row.pop("work") / (total[row["model"]] or 1.0)
    return [row for row in found.values() if row["waiting"] or row["running"] or row["share"] >= LEAST_SHARE]


_NOTHING: Mapping[str, Any] = {"waiting": 0, "running": 0, "work": 0.0, "limits": ()}


def key_sentence(row: Row) -> str:
    """Return ``alice: 4 running, 3 waiting; the last waits behind 2 of its own; alice's share 48%``."""
    key, waiting = row["key"], row["waiting"]
    at = f" at {row['model']}" if row["model"] else ""
    waits = f"; the last waits behind {waiting - 1} of its own" if waiting > 1 else ""
    limits = f"; {words}" if (words := limits_words(row)) else ""
    share = f"{key}'s share {row['share']:.0%}"
    return f"{key}{at}: {row['running']} running, {waiting} waiting{waits}; {share}{limits}"


def limits_words(row: Row) -> str:
    """Return ``58 of 60 requests/min, 4 of 4 at a time``; empty for a key without limits."""
    return ", ".join(f"{each['used']} of {each['limit']} {each['kind']}" for each in row["limits"])


def table_rows(rows: Sequence[Row]) -> tuple[tuple[str, ...], ...]:
    """Return the table, its headings first, without models where there is one; empty where nobody asks."""
    if not rows:
        return ()
    table = [
        COLUMNS,
        *((row["key"], row["model"], str(row["running"]), str(row["waiting"]), *_words(row)) for row in rows),
    ]
    has_models = any(row["model"] for row in rows)
    return tuple(each if has_models else (each[0], *each[2:]) for each in table)


def _words(row: Row) -> tuple[str, str]:
    return f"{row['share']:.0%}", limits_words(row) or "-"
