"""The planner's gauges, by the names that Dynamo's planner has from 1.2 on."""

from __future__ import annotations

import math
from collections.abc import Mapping

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import PoolSizes, Sample
from dynaplan.planner.model import DecisionRecord

PREFIX = "dynamo_planner_"
"""The beginning of every gauge's name."""


class GaugesRecorder:
    """Keeps the newest value of each gauge; see ``dynaplan.planner.ports.Recorder``.

    A gauge without a value in the newest interval is left out. GPU seconds are added up from pull to pull.
    """

    def __init__(self, settings: PlannerSettings) -> None:
        self._settings = settings
        self._last: Sample | None = None
        self._gpu_s = 0.0
        self._of_decision: Mapping[str, float] = {}

    def record_sample(self, sample: Sample) -> None:
        """Count the workers, and the time of their GPUs since the pull before."""
        if self._last:
            passed_s = max(0.0, sample.at_s - self._last.at_s)
            self._gpu_s += passed_s * gpus_of(self._last, self._settings)
        self._last = sample

    def record_decision(self, record: DecisionRecord) -> None:
        self._of_decision = values_of(record)

    def read(self) -> dict[str, float]:
        """Return the present value of each gauge by its name."""
        numbers = {"gpu_seconds_total": self._gpu_s, **self._of_decision}
        if self._last:
            replicas = replicas_of(self._last)
            numbers["num_prefill_replicas"] = replicas.prefill
            numbers["num_decode_replicas"] = replicas.decode
            if self._last.prefill_queue is not None:
                numbers["prefill_queue_size"] = self._last.prefill_queue
        return {PREFIX + name: value for name, value in numbers.items()}

    def close(self) -> None:
        pass


def replicas_of(sample: Sample) -> PoolSizes:
    """Return the replicas at a pull: the workers awake, and those asleep, which keep their GPUs."""
    return PoolSizes(
        sample.prefill_workers + sample.prefill_asleep, sample.decode_workers + sample.decode_asleep
    )


def gpus_of(sample: Sample, settings: PlannerSettings) -> int:
    """Return the GPUs that the replicas at a pull have."""
    replicas = replicas_of(sample)
    return (
        replicas.prefill * settings.prefill_engine_num_gpu + replicas.decode * settings.decode_engine_num_gpu
    )


def values_of(record: DecisionRecord) -> dict[str, float]:
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
        tuning = record.next_state.tuning
        numbers |= {
            "sla_target_ttft_ms": record.settings.ttft_ms,
            "sla_target_itl_ms": record.settings.itl_ms,
            "prefill_correction_factor": corrections.prefill,
            "decode_correction_factor": corrections.decode,
            "error_budget_ttft_requests": budget.ttft_requests,
            "error_budget_itl_requests": budget.itl_requests,
            "running_limit_requests": tuning.running_limit.most if tuning.running_limit else None,
            "max_local_prefill_tokens": tuning.max_local_prefill_tokens,
            **_engine_options(record),
        }
    return {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}


def _engine_options(record: DecisionRecord) -> dict[str, float | None]:
    """Return the sizes of the engines' steps, and the part of the requests that another one would gain."""
    settings, answer = record.settings, record.observation.backtest
    trial = answer.best_trial if answer else None
    return {
        "prefill_max_num_batched_tokens": settings.prefill_step_limit_tokens,
        "decode_max_num_batched_tokens": settings.decode_step_limit_tokens,
        "decode_max_num_seqs": settings.decode_max_num_seqs,
        "best_option_gain": trial.in_time_after - trial.in_time_before if trial else None,
    }


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
