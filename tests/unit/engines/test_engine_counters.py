from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dynaplan.engines.engine_counters import EngineCounters, EngineSpans
from dynaplan.engines.registry import engine_kind
from dynaplan.engines.server.kind import ServerKind
from dynaplan.engines.server.metrics import read_metrics
from dynaplan.engines.timing_model.learnt_timing import StepCounts
from dynaplan.engines.worker_load import WorkerLoad

FIXTURES = Path(__file__).parents[2] / "fixtures" / "engines"


def counters(at_s: float, steps: float, busy_s: float = 0.0, prompt_tokens: float = 100.0) -> EngineCounters:
    """Of an engine that decodes 4 sequences in each step, and has 1,000 tokens in its KV cache."""
    return EngineCounters(at_s, steps, 4 * steps, prompt_tokens, 1.0, busy_s, 1000.0, 8000.0)


def read(readings: list[tuple[EngineCounters, int]]) -> list[StepCounts]:
    spans = EngineSpans()
    return [found for each, running in readings if (found := spans.read(each, running))]


def test_a_busy_second_is_an_equation() -> None:
    [found] = read([(counters(10.0, 100), 4), (counters(11.0, 200), 4)])
    assert found == StepCounts(1000.0, 100, 400, 100_000, 0, 0)
    assert found.batch == 4


def test_a_second_with_an_idle_end_is_none_where_time_at_work_is_not_counted() -> None:
    assert read([(counters(10.0, 100), 4), (counters(11.0, 150), 0)]) == []
    assert read([(counters(10.0, 100), 0), (counters(11.0, 150), 4)]) == []


def test_where_time_at_work_is_counted_a_second_with_an_idle_end_is_an_equation_of_it() -> None:
    [found] = read([(counters(10.0, 100, 3.0), 4), (counters(11.0, 150, 3.5), 0)])
    assert found.busy_ms == 500.0


def test_a_span_goes_on_until_enough_steps_were_counted() -> None:
    slow = [(counters(10.0 + second, 100 + 4 * second), 4) for second in range(4)]
    [found] = read(slow)
    assert (found.busy_ms, found.steps) == (3000.0, 12)


def test_a_long_prompt_ends_a_span_when_it_is_computed() -> None:
    waiting = [(counters(10.0 + second, 100), 1) for second in range(7)]
    [found] = read([*waiting, (counters(17.0, 101, prompt_tokens=2100.0), 1)])
    assert (found.busy_ms, found.prompt_tokens) == (7000.0, 2000.0)


def with_prompt(at_s: float, steps: float, prompt_tokens: float = 100.0) -> EngineCounters:
    """While a prompt is computed that is counted once it is whole."""
    return replace(counters(at_s, steps, prompt_tokens=prompt_tokens), unfinished_prompts=1.0)


def test_a_span_ends_with_the_prompt_that_is_computed_at_its_end() -> None:
    [found] = read(
        [(counters(10, 100), 4), (with_prompt(11, 120), 4), (counters(12, 125, prompt_tokens=900.0), 4)]
    )
    assert (found.busy_ms, found.steps, found.prompt_tokens) == (2000.0, 25, 800)


def test_a_span_begins_after_the_prompt_that_is_computed_at_its_beginning() -> None:
    [found] = read(
        [
            (with_prompt(10, 100), 4),
            (counters(12, 105, prompt_tokens=900.0), 4),
            (counters(13, 205, prompt_tokens=900.0), 4),
        ]
    )
    assert (found.busy_ms, found.steps, found.prompt_tokens) == (1000.0, 100, 0)


def test_where_prompts_never_cease_a_long_span_may_cut_one() -> None:
    readings = [(with_prompt(10 + second, 100 + second, 100.0 * second), 1) for second in range(12)]
    [found] = read(readings)
    assert (found.busy_ms, found.prompt_tokens) == (10_000.0, 1000)


def test_the_same_reading_twice_says_nothing() -> None:
    assert read([(counters(10.0, 100), 4), (counters(10.0, 100), 4), (counters(10.5, 150), 4)]) == []


def test_an_engine_that_started_again_begins_anew() -> None:
    readings = [(counters(10.0, 900), 4), (counters(11.0, 50), 4), (counters(12.0, 150), 4)]
    assert [found.steps for found in read(readings)] == [100]


def test_without_a_count_of_steps_running_requests_tell_them() -> None:
    begin, end = (EngineCounters(at_s, 0.0, decoded, 10.0) for at_s, decoded in ((10.0, 100), (11.0, 500)))
    [found] = read([(begin, 4), (end, 4)])
    assert (found.steps, found.decoded_tokens) == (100, 400)


@pytest.mark.parametrize(
    ("engine", "file", "expected"),
    [
        ("vllm", "metrics_busy.txt", EngineCounters(0, 33, 63, 2757, 9, 0, 2912, 3200)),
        ("llamacpp", "metrics_idle.txt", EngineCounters(0, 24, 24, 62, 0)),
        ("sglang", "metrics_decode.txt", EngineCounters(0, 0, 640, 1500, 2, 0, 27525, 65536)),
        ("trtllm", "metrics.txt", None),
    ],
)
def test_recorded_metrics_tell_what_the_engine_counted(
    engine: str, file: str, expected: EngineCounters | None
) -> None:
    kind = engine_kind(engine)
    assert isinstance(kind, ServerKind)
    assert read_metrics((FIXTURES / engine / file).read_text(), kind.metric_names).counters == expected


def test_a_load_carries_the_counters() -> None:
    load = WorkerLoad(running_requests=3, counters=counters(12.0, 100))
    assert WorkerLoad.from_json(load.to_json()) == load
    assert WorkerLoad.from_json(WorkerLoad().to_json()).counters is None
