"""The models that are loaded on request, as ``models``, ``status`` and ``top`` show them: pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from dynaplan.contract.counts import WorkerCounts
from dynaplan.contract.model_keys import NO_DEMAND, ModelDemand, ModelEvent, ModelReport
from dynaplan.models.model import HOST
from dynaplan.util.amounts import GIB, gib
from dynaplan.util.durations import clock, local_time
from dynaplan.util.tables import fold, text_table

READY = "ready"
NOT_LOADED = ("unloaded", "failed")

COLUMNS_DROPPED = ("WATTS", "WH/KTOK", "REQ/S", "GPUS", "LEAVES", "TOK/S")
"""The columns that a narrow screen does without, the first first."""

Row = Mapping[str, Any]
"""One model in its JSON form: the fields of its report, of the demand for it, and ``saved_kv``."""


@dataclass(frozen=True)
class SavedKv:
    """The KV entries that a model saved when it was put away: of how many prompts, tokens, bytes."""

    prompts: int = 0
    tokens: int = 0
    size_bytes: int = 0


NOTHING_SAVED: Mapping[str, SavedKv] = MappingProxyType({})


def model_rows(
    reports: Mapping[str, ModelReport],
    demand: Mapping[str, ModelDemand],
    saved: Mapping[str, SavedKv] = NOTHING_SAVED,
) -> dict[str, dict[str, Any]]:
    """Return the JSON form of each model, by name."""
    return {
        name: {
            **asdict(each),
            **asdict(demand.get(name, NO_DEMAND)),
            "saved_kv": asdict(saved.get(name, SavedKv())),
        }
        for name, each in reports.items()
    }


def table_rows(rows: Mapping[str, Row], now_s: float) -> list[tuple[str, ...]]:
    """Return the table, its headings first; workers have a column where a model may have several.

    The load of the last minute, and the power, have columns where they were followed.
    """
    have_several = any(row["max_workers"] > 1 or row["prefill"] for row in rows.values())
    headings = ("MODEL", "STATE", "WORKERS", "MEMORY", "GPUS", "RUNNING", "WAITING", "LEAVES")
    table = [headings, *(_cells(name, row, now_s) for name, row in rows.items())]
    if not have_several:
        table = [(*each[:2], *each[3:]) for each in table]
    if any("load" in row for row in rows.values()):
        rates = [("REQ/S", "TOK/S"), *(_rates(row.get("load")) for row in rows.values())]
        table = [(*each, *more) for each, more in zip(table, rates, strict=True)]
    if any(row.get("power") for row in rows.values()):
        powers = [("WATTS", "WH/KTOK"), *(_power(row.get("power")) for row in rows.values())]
        table = [(*each, *more) for each, more in zip(table, powers, strict=True)]
    return table


def models_table(rows: Mapping[str, Row], now_s: float, width: int) -> str:
    """Return the table, and below it a line for each model about which there is something to say."""
    table = text_table(table_rows(rows, now_s), width=width, dropping=COLUMNS_DROPPED)
    return "\n".join([table, *(fold(note, width, "  ") for note in model_notes(rows))])


def model_notes(rows: Mapping[str, Row]) -> list[str]:
    """Return why each model is not ready, where that is known, and what it has saved."""
    notes = []
    for name, row in rows.items():
        why = row["refusal"]["why"] if row["refusal"] else row["why"]
        if why and row["state"] != READY:
            notes.append(f"{name}: {why}")
            notes += (f"  {line}" for line in row["last_lines"].splitlines())
        if row["state"] == READY and row["waiting"] and row["in_flight"]:
            notes.append(
                f"{name}: {row['waiting']} wait until one of the {row['in_flight']} that it answers has ended"
            )
        if row["saved_kv"]["prompts"]:
            notes.append(f"{name}: {_saved_words(SavedKv(**row['saved_kv']))}")
    return notes


def memory_lines(devices: Iterable[Row]) -> list[str]:
    """Return a sentence for each device about which model has how much of the memory that they share."""
    lines = []
    for row in devices:
        others_bytes = row["foreign_bytes"]
        held = [f"{name} {held_bytes / GIB:.1f}" for name, held_bytes in row["by_model"].items()]
        if others_bytes:
            held.append(f"other programs {others_bytes / GIB:.1f}")
        free_bytes = row["total_bytes"] - others_bytes - sum(row["by_model"].values())
        where = "of the machine's memory" if row["index"] == HOST else f"of GPU {row['index']}"
        held.append(f"free {max(0, free_bytes) / GIB:.1f} of {gib(row['total_bytes'])} {where} for models")
        lines.append(", ".join(held))
    return lines


def event_line(event: ModelEvent) -> str:
    """Return what was decided about a model, and when in local time."""
    return f"{local_time(event.at_unix_s)}  model {event.model}: {event.sentence}"


def _cells(name: str, row: Row, now_s: float) -> tuple[str, ...]:
    waits = f" ({clock(now_s - row['oldest_unix_s'])})" if row["waiting"] else ""
    return (
        name,
        model_state(row, now_s),
        _workers(row) + (f", prefill {_workers(row['prefill'])}" if row["prefill"] else ""),
        gib(row["memory_bytes"]) if row["memory_bytes"] else "-",
        ",".join(map(str, row["gpus"])) or "-",
        str(row["in_flight"]),
        f"{row['waiting']}{waits}",
        _leaves(row, now_s),
    )


def _rates(load: Row | None) -> tuple[str, str]:
    return (f"{load['requests_per_s']:.1f}", f"{load['tokens_per_s']:.0f}") if load else ("-", "-")


def _power(power: Row | None) -> tuple[str, str]:
    """Return the watts, and the watt-hours per 1,000 tokens."""
    if not power:
        return "-", "-"
    energy = power["wh_per_1000_tokens"]
    return f"{power['watts']:.0f}", "-" if energy is None else f"{energy:.2g}"


def _workers(pool: Row) -> str:
    """Return how many workers a pool has, and may have."""
    return f"{WorkerCounts.from_json(pool['workers']).holding} of {pool['max_workers']}"


def _saved_words(saved: SavedKv) -> str:
    prompts = "1 prompt" if saved.prompts == 1 else f"{saved.prompts} prompts"
    return f"{prompts} of {saved.tokens} tokens saved for its next load, {saved.size_bytes / 10**6:.0f} MB"


def model_state(row: Row, now_s: float) -> str:
    """Return the model's state; while it loads, also for how long it has, and how long it usually takes."""
    if row["state"] != "loading":
        return str(row["state"])
    usually = f" (usually {clock(row['load_s'])})" if row["load_s"] else ""
    return f"loading {clock(now_s - row['since_unix_s'])}{usually}"


def _leaves(row: Row, now_s: float) -> str:
    if row["is_pinned"]:
        return "pinned"
    if row["state"] != READY or not row["leaves_unix_s"]:
        return "-"
    return f"in {clock(row['leaves_unix_s'] - now_s)}"
