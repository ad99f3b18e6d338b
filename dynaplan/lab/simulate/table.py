"""The table of a comparison: one row per policy, and the notes below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynaplan.simulation.outcome import Distribution
from dynaplan.simulation.run import Result

Row = Mapping[str, Any]
"""One policy's numbers, as plain data."""

Columns = Mapping[str, tuple[str, str]]
"""The key of each column of the table: its heading, and the format of its values."""

COLUMNS: Columns = {
    "policy": ("POLICY", "{}"),
    "slo": ("SLO MET", "{:.1%}"),
    "ttft_slo": ("TTFT MET", "{:.1%}"),
    "itl_slo": ("ITL MET", "{:.1%}"),
    "goodput_per_s": ("GOODPUT/s", "{:.2f}"),
    "ttft_p50_ms": ("TTFT p50", "{:.0f}"),
    "ttft_p95_ms": ("TTFT p95", "{:.0f}"),
    "itl_p50_ms": ("ITL p50", "{:.1f}"),
    "itl_p95_ms": ("ITL p95", "{:.1f}"),
    "queued_p95_ms": ("QUEUED p95", "{:.0f}"),
    "hit_rate": ("HITS", "{:.1%}"),
    "gpu_hours": ("GPU-HOURS", "{:.3f}"),
    "scale_events": ("SCALED", "{}"),
    "flaps": ("FLAPS", "{}"),
    "lost": ("LOST", "{}"),
}
"""All columns; ``hit_rate`` is there when the trace has prefixes."""

OPTIONAL_COLUMNS = (
    *("queued_p95_ms", "itl_p50_ms", "ttft_p50_ms", "flaps", "goodput_per_s", "scale_events"),
    *("ttft_slo", "itl_slo"),
)
"""The columns that a narrow screen does without, the first first."""


def columns_of(table: Sequence[Row]) -> Columns:
    """Return the columns that occur in a row; all of them for an empty table."""
    return {
        key: column
        for key, column in COLUMNS.items()
        if not table or any(row.get(key) is not None for row in table)
    }


def rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return one row per result: attainment as a part of 1, latencies in ms; ``note`` where there is one."""
    return [_row(result) | ({"note": result.note} if result.note else {}) for result in results]


def notes(results: Sequence[Result]) -> list[str]:
    return [result.note for result in results if result.note]


def _row(result: Result) -> dict[str, Any]:
    outcome = result.outcome
    return {
        "policy": result.policy,
        "requests": outcome.requests,
        "lost": outcome.lost,
        "slo": outcome.attainment(outcome.both_met),
        "ttft_slo": outcome.attainment(outcome.ttft_met),
        "itl_slo": outcome.attainment(outcome.itl_met),
        "goodput_per_s": outcome.both_met / result.trace_s if result.trace_s else 0.0,
        **_percentiles("ttft", outcome.ttft_ms),
        **_percentiles("itl", outcome.itl_ms),
        "queued_p95_ms": outcome.queued_ms.percentile(95),
        "hit_rate": outcome.hit_rate,
        "imbalance": outcome.imbalance,
        "gpu_hours": result.gpu_hours,
        "scale_events": result.scale_events,
        "flaps": result.flaps,
    }


def _percentiles(name: str, values_ms: Distribution) -> dict[str, float]:
    return {f"{name}_p{percent}_ms": values_ms.percentile(percent) for percent in (50, 95, 99)}
