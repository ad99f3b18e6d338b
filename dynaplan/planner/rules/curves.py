"""Observations and decisions as numbers over time, for metrics and for TensorBoard.

The names are those of Dynamo's planner from 1.2 on, without its prefix ``dynamo_planner_``.
"""

from __future__ import annotations

import math

from dynaplan.planner.model.decisions import DecisionRecord


def curves_of(record: DecisionRecord) -> dict[str, float]:
    """Return the numbers of one interval by name; unknown ones are left out."""
    desired = record.decision.desired
    numbers: dict[str, float | None] = {
        "predicted_num_prefill_replicas": desired.prefill,
        "predicted_num_decode_replicas": desired.decode,
        **_observed(record),
        **_predicted(record),
    }
    if record.settings.is_by_targets:
        corrections, budget = record.next_state.corrections, record.next_state.error_budget
        numbers |= {
            "sla_target_ttft_ms": record.settings.ttft_ms,
            "sla_target_itl_ms": record.settings.itl_ms,
            "prefill_correction_factor": corrections.prefill,
            "decode_correction_factor": corrections.decode,
            "error_budget_ttft_requests": budget.ttft_requests,
            "error_budget_itl_requests": budget.itl_requests,
        }
    return {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}


def _observed(record: DecisionRecord) -> dict[str, float | None]:
    traffic = record.observation.traffic
    if traffic is None:
        return {}
    requests, duration_ms = traffic.requests, traffic.duration_ms
    return {
        "observed_requests_per_second": None if requests is None else requests / traffic.interval_s,
        "observed_ttft_ms": traffic.ttft_ms,
        "observed_itl_ms": traffic.itl_ms,
        "observed_request_duration_seconds": None if duration_ms is None else duration_ms / 1000,
        "observed_input_sequence_tokens": traffic.isl_tokens,
        "observed_output_sequence_tokens": traffic.osl_tokens,
    }


def _predicted(record: DecisionRecord) -> dict[str, float | None]:
    foresight, prediction = record.observation.foresight, record.decision.prediction
    numbers: dict[str, float | None] = {}
    if foresight and foresight.expected:
        soon = foresight.expected[0]
        rate = None if soon.requests is None else soon.requests / foresight.interval_s
        numbers = {
            "predicted_requests_per_second": rate,
            "predicted_input_sequence_tokens": soon.isl_tokens,
            "predicted_output_sequence_tokens": soon.osl_tokens,
        }
    if prediction:
        numbers |= {"estimated_ttft_ms": prediction.ttft_ms, "estimated_itl_ms": prediction.itl_ms}
    return numbers
