"""The Frontend's metrics: tokens counted from passing bytes, times from the clock, Dynamo's names."""

from __future__ import annotations

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dynaplan.contract.traffic import INPUT_TOKENS, OUTPUT_TOKENS
from dynaplan.gateway import metrics as frontend_metrics
from dynaplan.gateway.engine_answers import Usage
from dynaplan.gateway.metrics import FrontendMetrics
from tests.fakes.clock import ManualClock
from tests.fakes.promlint import faults


def samples(metrics: FrontendMetrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        sample.name.removeprefix("dynamo_frontend_"): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def test_the_first_token_makes_the_ttft_and_the_gaps_the_itl() -> None:
    clock = ManualClock()
    metrics = FrontendMetrics("ns", clock.now_s)
    record = metrics.record("m", "chat_completions", is_stream=True)
    for later_s, tokens in (
        (0.25, 0),
        (0.25, 1),
        (0.1, 2),
        (0.2, 1),
        (1.0, 0),
    ):
        clock.advance(later_s)
        record.observe(tokens)
    record.finish("", input_tokens=7)
    seen = samples(metrics)
    assert seen["time_to_first_token_seconds_sum"] == pytest.approx(0.5)
    assert seen["inter_token_latency_seconds_sum"] == pytest.approx(0.3)
    assert seen["inter_token_latency_seconds_count"] == 3
    assert seen["output_sequence_tokens_sum"] == seen["output_tokens_total"] == 4
    assert seen["input_sequence_tokens_sum"] == 7
    assert seen["request_duration_seconds_sum"] == pytest.approx(1.8)


def test_requests_over_the_promised_times_are_counted_exactly_and_none_is_seen_as_zero() -> None:
    clock = ManualClock()
    metrics = FrontendMetrics("ns", clock.now_s, promised_ms=(500.0, 20.0))

    def answer(ttft_s: float, gap_s: float, tokens: int) -> tuple[float, float]:
        record = metrics.record("m", "completions", is_stream=True)
        for later_s in (ttft_s, *[gap_s] * (tokens - 1)):
            clock.advance(later_s)
            record.observe(1)
        record.finish("", input_tokens=7)
        seen = samples(metrics)
        return seen["requests_over_ttft_total"], seen["requests_over_itl_total"]

    assert answer(0.4, 0.01, 3) == (0, 0)
    assert answer(0.6, 0.01, 3) == (1, 0)
    assert answer(0.4, 0.03, 3) == (1, 1)
    assert answer(0.6, 0.0, 1) == (2, 1)
    assert (
        b'requests_over_itl_total{dynamo_namespace="ns",model="m",target_ms="20.0"} 1.0' in metrics.render()
    )
    unpromised = FrontendMetrics("ns", clock.now_s)
    unpromised.record("m", "completions", is_stream=True).finish("", input_tokens=7)
    assert not [name for name in samples(unpromised) if "over" in name]


def test_what_the_answer_states_counts_and_not_the_estimate() -> None:
    metrics = FrontendMetrics("ns", ManualClock().now_s)
    record = metrics.record("m", "completions", is_stream=False)
    record.finish("", input_tokens=7, stated=Usage(31, 8, 30))
    seen = samples(metrics)
    assert seen["input_sequence_tokens_sum"] == 31
    assert seen["output_sequence_tokens_sum"] == seen["output_tokens_total"] == 8
    assert (seen["cached_tokens_sum"], seen["cached_tokens_count"]) == (30, 1)


def test_a_request_is_inflight_until_it_ends_and_queued_until_it_answers() -> None:
    metrics = FrontendMetrics("ns", ManualClock().now_s)
    record = metrics.record("m", "completions", is_stream=False)
    assert (samples(metrics)["inflight_requests"], samples(metrics)["queued_requests"]) == (1, 1)
    record.begin_answer()
    assert (samples(metrics)["inflight_requests"], samples(metrics)["queued_requests"]) == (1, 0)
    record.finish("internal", input_tokens=7)
    assert (samples(metrics)["inflight_requests"], samples(metrics)["queued_requests"]) == (0, 0)


def test_a_refused_request_is_counted_and_makes_no_series_of_a_model() -> None:
    metrics = FrontendMetrics("ns", ManualClock().now_s)
    metrics.count_refusal("completions", "validation")
    metrics.record("m", "completions", is_stream=False)
    assert samples(metrics)["requests_total"] == 1
    assert b'inflight_requests{dynamo_namespace="ns",model="m"}' in metrics.render()
    assert b'inflight_requests{dynamo_namespace="ns",model="unknown"}' not in metrics.render()


def test_a_failed_request_counts_and_does_not_change_the_lengths() -> None:
    metrics = FrontendMetrics("ns", ManualClock().now_s)
    metrics.record("m", "completions", is_stream=False).finish("internal", input_tokens=7)
    assert samples(metrics)["requests_total"] == 1
    assert (
        "input_sequence_tokens_count" not in samples(metrics)
        or not samples(metrics)["input_sequence_tokens_count"]
    )


@pytest.mark.parametrize(
    ("buckets", "lowest", "highest"),
    [
        (frontend_metrics.DURATION_S, 1.0, 512.0),
        (INPUT_TOKENS, 50.0, 128000.0),
        (OUTPUT_TOKENS, 50.0, 32000.0),
        (frontend_metrics.TTFT_S, 0.001, 480.0),
        (frontend_metrics.ITL_S, 0.001, 80.0),
    ],
)
def test_the_buckets_begin_at_zero_rise_and_end_where_dynamos_do(
    buckets: tuple[float, ...], lowest: float, highest: float
) -> None:
    assert buckets[0] == 0
    assert list(buckets) == sorted(set(buckets))
    assert lowest < buckets[1]
    assert math.isclose(buckets[-1], highest, rel_tol=0.02)


def test_the_prefix_can_be_changed_as_in_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_METRICS_PREFIX", "mine")
    assert b"mine_disconnected_clients" in FrontendMetrics("ns", ManualClock().now_s).render()


def test_every_metric_has_a_help_text_and_a_name_by_the_rules() -> None:
    metrics = FrontendMetrics("ns", ManualClock().now_s)
    metrics.describe_model("m", True, {"context_tokens": 4096, "kv_block_tokens": 16})
    metrics.record("m", "completions", is_stream=True).finish("", 7, Usage(7, 5, 3))
    metrics.count_refusal("completions", "overload")
    metrics.count_disconnect()
    metrics.count_prefill("m", "remote")
    assert faults(metrics.render().decode()) == []
