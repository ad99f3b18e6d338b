from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaplan.engines.server.metrics import EngineMetrics, MetricNames, read_metrics
from dynaplan.engines.vllm import METRIC_NAMES
from dynaplan.engines.worker_load import WorkerLoad

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures" / "engines" / "vllm"
NAMES = MetricNames(
    running=("e:running",),
    waiting=("e:waiting",),
    waiting_besides=("e:queue_a", "e:queue_b"),
    kv_usage=("e:usage", "e:old_usage"),
    kv_total=("e:total",),
    kv_active=("e:used",),
    prefix_hit_rate=("e:hit_rate",),
    progress=(("e:tokens_total",), ("e:steps_total", "e:old_steps_total")),
    samples=("e:tokens_total", "e:ttft_sum"),
)


def recorded(name: str) -> EngineMetrics:
    return read_metrics((FIXTURES / name).read_text(), METRIC_NAMES)


def test_a_busy_vllm_tells_its_queue_and_its_kv_cache() -> None:
    signals = recorded("metrics_busy.txt")
    assert (signals.running, signals.waiting) == (6, 18)
    assert signals.kv_usage == pytest.approx(0.909, abs=0.001)
    assert (signals.kv_active, signals.kv_total, signals.block_tokens) == (91, 100, 32)
    assert signals.prefix_hit_rate == pytest.approx(32 / 2789)
    assert signals.progress == (72, 2789, 33)
    assert signals.samples["vllm:time_to_first_token_seconds_count"] == 9
    assert signals.samples["vllm:request_success_total"] == 3  # summed over the reasons
    assert signals.missing == ()


def test_an_idle_vllm_has_no_load_and_tells_everything() -> None:
    signals = recorded("metrics_idle.txt")
    own = WorkerLoad(kv_total_blocks=100, generated_tokens=24)
    assert replace(signals.load(), prefix_hit_rate=0, counters=None) == own
    assert signals.missing == ()


def test_progress_differs_between_two_readings_of_a_busy_vllm() -> None:
    assert recorded("metrics_busy.txt").progress != recorded("metrics_after.txt").progress


def test_several_engines_behind_one_port_are_one_load() -> None:
    text = """
        e:running{engine="0"} 3.0
        e:running{engine="1"} 4.0
        e:usage{engine="0"} 0.25
        e:usage{engine="1"} 0.75
        e:total{engine="0"} 100
        e:total{engine="1"} 100
    """
    signals = read_metrics("\n".join(map(str.strip, text.splitlines())), NAMES)
    assert (signals.running, signals.kv_usage, signals.kv_total, signals.kv_active) == (7, 0.75, 200, 150)


def test_the_name_of_the_newest_version_counts_when_both_are_there() -> None:
    assert read_metrics("e:old_usage 0.5", NAMES).kv_usage == 0.5
    assert read_metrics("e:old_usage 0.5\ne:usage 0.25", NAMES).kv_usage == 0.25


def test_queues_beside_the_waiting_requests_are_added() -> None:
    signals = read_metrics("e:waiting 2\ne:queue_a 3\ne:queue_b 1\ne:queue_c 9", NAMES)
    assert signals.waiting == 6


def test_what_the_engine_counts_itself_comes_before_what_follows_from_the_usage() -> None:
    assert read_metrics("e:usage 0.5\ne:total 1000\ne:used 123", NAMES).kv_active == 123


def test_a_missing_signal_is_0_and_named_with_what_was_tried() -> None:
    signals = read_metrics("e:running 1", NAMES)
    assert signals.waiting == 0 and signals.kv_usage == 0
    assert "waiting (e:waiting)" in signals.missing
    assert "kv_usage (e:usage, e:old_usage)" in signals.missing
    assert not any("queue" in each or "running" in each for each in signals.missing)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-3", "much"])
def test_a_value_that_is_none_counts_as_0(value: str) -> None:
    signals = read_metrics(f"e:running {value}\ne:usage {value}\ne:waiting 2", NAMES)
    assert (signals.running, signals.kv_usage, signals.waiting) == (0, 0, 2)


@pytest.mark.parametrize(
    "line", ["e:running{", "e:running", 'e:running{a="b" 1', "e:running{} x 1", "e:running 1 2 3"]
)
def test_a_broken_line_spoils_only_itself(line: str) -> None:
    assert read_metrics(f"{line}\ne:waiting 2", NAMES).waiting == 2


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(), st.text('e:running{}=",. 0123456789\n\\#')))
def test_no_text_at_all_makes_reading_fail(text: str) -> None:
    signals = read_metrics(f"{text}\ne:usage {text}\ne:usage{{{text}}} 1", NAMES)
    assert 0 <= signals.kv_usage <= 1 and signals.running >= 0


def test_the_block_size_gives_the_blocks_where_only_the_tokens_are_told() -> None:
    text = 'vllm:cache_config_info{block_size="32",kv_cache_size_tokens="3200",num_gpu_blocks="None"} 1.0'
    signals = read_metrics(text, METRIC_NAMES)
    assert (signals.kv_total, signals.block_tokens) == (100, 32)


def test_the_load_is_told_in_blocks_and_slots() -> None:
    signals = EngineMetrics(
        running=2, waiting=1, kv_usage=0.5, kv_active=50, kv_total=100, prefix_hit_rate=0.1
    )
    assert signals.load(request_slots=8) == WorkerLoad(2, 8, 1, 50, 100, 0.5, 0.1)


def test_progress_counters_that_are_missing_are_not_taken_for_ones_that_stand_still() -> None:
    assert read_metrics("e:running 1", NAMES).progress == ()
    assert read_metrics("e:running 1\ne:old_steps_total 0", NAMES).progress == (0.0,)
