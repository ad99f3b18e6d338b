"""The load that a frontend keeps: steps of what was counted, bounded, and read by who comes later."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynaplan.cli.load_past import SAMPLE_S, samples_of_histories
from dynaplan.gateway.engine_answers import Usage
from dynaplan.gateway.load_history import KEPT_S, STEP_S, LatencyCounts, LoadCounts, LoadHistory
from dynaplan.gateway.metrics import FrontendMetrics
from dynaplan.webui.charts import ModelRates
from tests.fakes.clock import ManualClock


def steps(history: LoadHistory) -> list[dict[str, Any]]:
    return list(history.to_json({})["steps"])


def test_a_step_is_what_was_counted_since_the_one_before() -> None:
    clock, counts = ManualClock(), LoadCounts(5.0, 50.0, LatencyCounts((1.0, 0.0), 0.5))
    now = [counts]
    history = LoadHistory(lambda: now[0], clock.now_s)
    clock.advance(STEP_S - 1)
    now[0] = LoadCounts(8.0, 90.0, LatencyCounts((1.0, 2.0), 3.5))
    assert steps(history) == [], "a step has a least length"
    clock.advance(3)
    history.update()
    clock.advance(1)
    (step,) = steps(history)
    assert (step["ended_ago_s"], step["lasted_s"]) == (1.0, STEP_S + 2)
    assert (step["requests"], step["tokens"]) == (3.0, 40.0)
    assert step["ttft"] == {"buckets": {"1": 2.0}, "sum_s": 3.0}


def test_counters_of_a_frontend_that_is_gone_take_nothing_away() -> None:
    clock, now = ManualClock(), [LoadCounts(5.0)]
    history = LoadHistory(lambda: now[0], clock.now_s)
    now[0] = LoadCounts(2.0)
    clock.advance(STEP_S)
    assert steps(history)[0]["requests"] == 0.0


def test_what_is_older_than_the_longest_charts_is_let_go() -> None:
    clock = ManualClock()
    history = LoadHistory(LoadCounts, clock.now_s)
    for _ in range(int(KEPT_S / STEP_S) + 5):
        clock.advance(STEP_S)
        history.update()
    assert len(steps(history)) == KEPT_S / STEP_S + 1


def test_a_frontends_history_becomes_samples_with_its_rates_and_latencies() -> None:
    clock = ManualClock()
    metrics = FrontendMetrics("ns", clock.now_s)
    clock.advance(3600)
    for _ in range(20):
        record = metrics.record("m", "chat_completions", is_stream=True)
        clock.advance(0.25)
        record.observe(1)
        clock.advance(0.25)
        record.observe(1)
        record.finish("", input_tokens=7)
    clock.advance(30)
    history = json.loads(metrics.render_history())
    samples = samples_of_histories([history, {"steps": 7}, {}], 10_000.0)
    busy = [each for each in samples if each.requests_per_s]
    assert sum(each.requests_per_s * each.lasted_s for each in busy) == pytest.approx(20)
    assert sum(each.tokens_per_s * each.lasted_s for each in busy) == pytest.approx(40)
    assert busy[0].ttft_ms == busy[0].itl_ms == pytest.approx(250)
    assert 220 < busy[0].ttft_high_ms <= 470, "its bucket"
    idle = [each for each in samples if not each.requests_per_s]
    assert len(idle) > 300, "an hour without requests is known to be one"
    assert {each.ttft_ms for each in idle} == {None}


def test_what_frontends_on_different_ports_count_at_one_time_is_added_up() -> None:
    def history(requests: float, ended_ago_s: float) -> dict[str, Any]:
        latency = {"buckets": {"0": requests}, "sum_s": requests}
        step = {"ended_ago_s": ended_ago_s, "lasted_s": 20.0, "requests": requests, "tokens": 0.0}
        return {
            "bounds_s": {"ttft": [2.0], "itl": [2.0]},
            "steps": [{**step, "ttft": latency, "itl": latency}],
        }

    samples = samples_of_histories([history(10.0, 0.0), history(20.0, 10.0)], 1000.0)
    assert [(each.at_s, each.requests_per_s) for each in samples] == [
        (980.0, 1.0),
        (990.0, 1.5),
        (1000.0, 0.5),
    ]
    assert samples[0].ttft_ms == 1000.0


def test_a_history_tells_the_models_apart() -> None:
    clock = ManualClock()
    metrics = FrontendMetrics("ns", clock.now_s)
    for model, tokens in (("ant", 40), ("bee", 5), ("ant", 40)):
        record = metrics.record(model, "chat_completions", is_stream=False)
        record.finish("", 3, Usage(3, tokens))
    clock.advance(SAMPLE_S)
    [sample] = samples_of_histories([json.loads(metrics.render_history())], SAMPLE_S)
    assert sample.by_model == {"ant": ModelRates(0.2, 8.0), "bee": ModelRates(0.1, 0.5)}
