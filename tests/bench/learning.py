"""How fast the step of an engine is learnt that nobody has told: linear, stepped by the batch, and KV-heavy.

An aggregated engine with chunked prefill, in the time of the model. The error is that of a decode step, in
the mean over batches up to the largest that was seen, against the truth.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from dynaplan.engines.engine_counters import EngineSpans
from dynaplan.engines.timing_model.engine_model import EngineModel, EngineRequest, EngineSettings
from dynaplan.engines.timing_model.learnt_timing import LearntTiming, StepLearner, StepLine
from dynaplan.engines.timing_model.step_timing import StepTiming
from tests.bench.table import Row

GUESS = StepLine(6.4, 0.012, 4.1e-5, 0.017, 1.0)
"""The linear engine; all three are within a factor of two of it at small batches."""

GRAPH_SIZES = (1, 2, 4, *range(8, 257, 8))


def _padded(batch: float) -> float:
    return next((size for size in GRAPH_SIZES if size >= batch), batch)


def _prefill_ms(tokens: float) -> float:
    return 7.4 + 0.017 * tokens


SHAPES = {
    "linear": StepTiming(_prefill_ms, GUESS.decode_ms),
    "stepped": StepTiming(_prefill_ms, lambda batch, kv: 6.0 + 0.15 * _padded(batch) + 4.1e-5 * kv),
    "KV-heavy": StepTiming(_prefill_ms, lambda batch, kv: 5.0 + 0.01 * batch + 4e-4 * kv),
}

AIM = 15.0
MINUTES = (1, 5, 15)


def rows(_: int) -> Iterator[Row]:
    """Simulated time: some seconds in all."""
    for shape, timing in SHAPES.items():
        for rate in (1.0, 10.0):
            for factor in (0.2, 3.0):
                prior = StepLine(*(factor * value for value in GUESS.coefficients))
                for minutes, known in _learn(timing, prior, rate):
                    name = f"{shape}, {rate:g}/s, prior x {factor:g}: step after {minutes} min"
                    yield Row(name, "% off", [100 * _error(known, timing)], AIM)


def _error(known: LearntTiming, timing: StepTiming) -> float:
    batches = range(1, max(2, round(known.largest_batch) + 1))
    return sum(
        abs(known.decode_ms(batch, 900.0 * batch) / timing.decode_ms(batch, 900.0 * batch) - 1)
        for batch in batches
    ) / len(batches)


def _learn(timing: StepTiming, prior: StepLine, rate: float) -> Iterator[tuple[int, LearntTiming]]:
    """Serve Poisson arrivals, 800 prompt and 150 answer tokens in the mean; read counters once a second."""
    draw = random.Random(3)
    engine = EngineModel(EngineSettings(total_blocks=25_000, batched_tokens=2048, jitter=0.05), timing)
    learner, spans = StepLearner(prior), EngineSpans()
    now_s = coming_s = 0.0
    number = read_s = 0
    for minutes in MINUTES:
        while now_s < 60 * minutes:
            while coming_s <= now_s:
                prompt, answer = 1 + int(draw.expovariate(1 / 800)), 2 + int(draw.expovariate(1 / 150))
                engine.submit(EngineRequest(str(number), min(prompt, 8000), min(answer, 2000)))
                number, coming_s = number + 1, coming_s + draw.expovariate(rate)
            now_s = coming_s if engine.is_idle else now_s + engine.step().duration_s
            if now_s < read_s:
                continue
            read_s = int(now_s) + 1
            load = engine.load()
            assert load.counters
            counters = replace(load.counters, at_s=now_s)
            if counts := spans.read(counters, load.running_requests):
                learner.learn(counts)
        yield minutes, learner.known
