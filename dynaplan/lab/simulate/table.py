"""The table of a comparison: one row per policy, and what the oracle knows beyond its row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynaplan.lab.simulate.run import Result, Verdict
from dynaplan.simulation.outcome import Outcome, Spread

Row = Mapping[str, Any]
"""One policy's numbers, as plain data."""

Columns = Mapping[str, tuple[str, str]]
"""The key of each column of the table: its heading, and the format of its values."""

COLUMNS: Columns = {
    "policy": ("POLICY", "{}"),
    "slo": ("SLO MET", "{:.1%}"),
    "oracle_slo": ("ORACLE'S", "{:.1%}"),
    "slo_of_oracle": ("SLO/ORACLE", "{:.2f}"),
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
    "gpu_hours_of_oracle": ("GPU-HOURS/ORACLE", "{:.2f}"),
}
"""All columns; ``hit_rate`` is there when the trace tells prefixes, those of the oracle when it is among the
policies. A share of its attainment stands beside both attainments: two targets of 95 % allow 90 % with both,
so a share alone would flatter."""

LEAST_NEEDED = (
    *("queued_p95_ms", "itl_p50_ms", "ttft_p50_ms", "flaps", "goodput_per_s", "scale_events"),
    *("ttft_slo", "itl_slo", "slo_of_oracle", "oracle_slo"),
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
    """Return one row per result: attainment as a part of 1, latencies in ms.

    With the oracle among them, every row compares itself with the oracle's (``..._of_oracle``, as parts of
    its values; ``oracle_slo`` is its attainment), and the oracle's own row has its verdict.
    """
    oracle = next((result for result in results if result.verdict), None)
    return [
        {
            **_row(result),
            **(_compared(result, oracle) if oracle else {}),
            **(_verdict_fields(result.verdict) if result.verdict else {}),
        }
        for result in results
    ]


def notes(results: Sequence[Result]) -> list[str]:
    """Return what is written below the table: the oracle's verdict in words, if it is among the policies."""
    return [_verdict_text(result.verdict, result.outcome) for result in results if result.verdict]


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


def _percentiles(name: str, values_ms: Spread) -> dict[str, float]:
    return {f"{name}_p{percent}_ms": values_ms.percentile(percent) for percent in (50, 95, 99)}


def _compared(result: Result, oracle: Result) -> dict[str, float]:
    met = oracle.outcome.both_met
    return {
        "oracle_slo": oracle.outcome.attainment(met),
        "slo_of_oracle": result.outcome.both_met / met if met else 1.0,
        "gpu_hours_of_oracle": result.gpu_hours / oracle.gpu_hours if oracle.gpu_hours else 1.0,
    }


def _verdict_fields(verdict: Verdict) -> dict[str, Any]:
    fields = {"is_slo_met": verdict.is_slo_met, "lower_bound_gpu_hours": verdict.lower_bound_gpu_hours}
    return fields | ({"no_lower_bound": verdict.no_lower_bound} if verdict.no_lower_bound else {})


def _verdict_text(verdict: Verdict, outcome: Outcome) -> str:
    slo = f"the SLO (each target by {verdict.percentile:g} % of the requests)"
    if verdict.is_slo_met:
        found = f"oracle: meets {slo}"
    else:
        found = f"oracle: no schedule that was simulated meets {slo}; this one came nearest"
    found += f". With it {outcome.attainment(outcome.both_met):.1%} meet both targets"
    if verdict.lower_bound_gpu_hours is None:
        return f"{found}. No lower bound: {verdict.no_lower_bound}."
    least = f"{verdict.lower_bound_gpu_hours:.3f} GPU-hours"
    return f"{found}. Every schedule that meets the SLO takes at least {least}."
