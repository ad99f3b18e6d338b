"""What is learnt of a llama-server's steps, from a recording (``tests/fixtures/engines/README.md``)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from dynaplan.engines.engine_counters import EngineCounters, EngineSpans
from dynaplan.engines.machine_speed import Machine, prior_line
from dynaplan.engines.model_memory import MemoryNeed
from dynaplan.engines.timing_model.learnt_timing import LearntTiming, StepLearner

RECORDING = Path(__file__).parents[3] / "fixtures" / "engines" / "llamacpp" / "steps.jsonl"
SMOLLM2 = MemoryNeed(weights_bytes=98e6, token_bytes=11_520, context_tokens=2048, sequences=8)
PROCESSOR = Machine("two cores", 2e10, has_gpu=False)


def readings() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RECORDING.read_text().splitlines()]


def counters(reading: dict[str, Any], clock: str) -> EngineCounters:
    steps = reading["n_decode_total"]
    return EngineCounters(
        reading[clock],
        steps,
        steps * reading["n_busy_slots_per_decode"],
        reading["prompt_tokens_total"],
        kv_tokens=sum(tokens for tokens, _ in reading["slots"]),
        unfinished_prompts=sum(not decoded for _, decoded in reading["slots"]),
    )


def learnt(clock: str) -> LearntTiming:
    learner, spans = StepLearner(prior_line(SMOLLM2, PROCESSOR, 0)), EngineSpans()
    for reading in readings():
        if counts := spans.read(counters(reading, clock), int(reading["requests_processing"])):
            learner.learn(counts)
    return learner.known


def decode_only_ms(batch: int) -> Iterator[float]:
    """The processor's time of a step, from seconds in which the same ``batch`` decoded throughout."""
    for before, after in pairwise(readings()):
        slots = [*before["slots"], *after["slots"]]
        if len(before["slots"]) == len(after["slots"]) == batch and all(decoded for _, decoded in slots):
            begin, end = counters(before, "cpu_s"), counters(after, "cpu_s")
            if end.prompt_tokens == begin.prompt_tokens and end.steps > begin.steps:
                yield 1000 * (end.at_s - begin.at_s) / (end.steps - begin.steps)


def test_by_the_processors_time_the_step_is_learnt() -> None:
    known = learnt("cpu_s")
    assert known.is_usable
    assert known.error < 0.12


def test_the_step_is_foretold_at_one_two_four_and_eight_at_once() -> None:
    known = learnt("cpu_s")
    errors = [abs(known.decode_ms(n, 110 * n) / median(decode_only_ms(n)) - 1) for n in (1, 2, 4, 8)]
    assert median(errors) < 0.12
    assert max(errors) < 0.2


def test_while_other_programs_hold_the_processor_the_error_says_so() -> None:
    """The engine computed in a third of the recording's time, between an eighth and all of a second."""
    assert not learnt("at_s").is_usable
