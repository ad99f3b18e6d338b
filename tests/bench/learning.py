"""How fast the step of an engine is learnt that nobody has told: linear, stepped by the batch, and KV-heavy.

In the time of the model; tensor parallelism makes the true step faster by less than its GPUs, and the prior
by all of them. Prompts are computed in chunks beside answers (aggregated), or by an engine of their own. Each
row has the errors of all priors on 1, 2 and 4 GPUs: of a decode step, in the mean over batches up to the
largest that was seen, or of a prompt of 800 tokens. And for how long a wrong step, which an earlier run has
left as right, is planned with.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from time import process_time

from dynaplan.engines.engine_counters import EngineCounters, EngineSpans
from dynaplan.engines.server.metrics import CounterNames, read_metrics
from dynaplan.engines.timing_model.engine_model import EngineModel, EngineRequest, EngineSettings
from dynaplan.engines.timing_model.learnt_timing import LearntTiming, StepCounts, StepLearner, StepLine
from dynaplan.engines.timing_model.step_timing import StepTiming
from dynaplan.engines.vllm import METRIC_NAMES
from dynaplan.engines.worker_load import WorkerLoad
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
SPEED_OF_GPUS = {1: 1.0, 2: 1.8, 4: 3.0}
PRIORS = (0.2, 0.7, 1.4, 3.0)
PROMPT_TOKENS, ANSWER_TOKENS = 800, 150

AIM = 15.0
READINGS = 1000
FIXTURES = Path(__file__).parents[1] / "fixtures" / "engines"
MINUTES = (1, 5, 15)


def rows(repeats: int) -> Iterator[Row]:
    """Simulated time: a minute in all."""
    yield Row(
        "a reading of a worker's load, learnt: the planner's CPU", "ms", _repeat(repeats, _learning_ms), 10
    )
    believed = [_seconds_believed(factor) for factor in PRIORS]
    yield Row("a wrong step that was kept as right: busy seconds until refused or mended", "s", believed, 3.0)
    yield Row("its counters, out of a worker's JSON: the planner's CPU", "ms", _repeat(repeats, _json_ms), 10)
    yield Row("vLLM's counters, out of its metrics: a worker's CPU", "ms", _repeat(repeats, _metrics_ms), 10)
    memory_mib = [float(run_python(MEMORY)) for _ in range(repeats)]
    yield Row("modules and state of learning, 16 workers: the planner's memory", "MiB", memory_mib, 5)
    for (shape, timing), is_aggregated, rate in product(SHAPES.items(), (True, False), (1.0, 10.0)):
        pools = "aggregated" if is_aggregated else "prefill and decode"
        runs = [
            _errors(timing.with_speedup(speed), gpus, rate, is_aggregated=is_aggregated)
            for gpus, speed in SPEED_OF_GPUS.items()
        ]
        for minutes, *of_gpus in zip(MINUTES, *runs, strict=True):
            for what, errors in zip(("a decode step", "a prompt"), zip(*of_gpus, strict=True), strict=True):
                name = f"{shape}, {pools}, {rate:g}/s: {what} after {minutes} min"
                yield Row(name, "% off", [100 * each for own in errors for each in own], AIM)


def _repeat(repeats: int, measure: Callable[[], float]) -> list[float]:
    return [measure() for _ in range(repeats)]


def _learning_ms() -> float:
    """A worker is read once a second: 10 ms are a hundredth of a core."""
    learner, begun_s = StepLearner(GUESS), process_time()
    for number in range(READINGS):
        learner.learn(StepCounts(1000.0 + number, 100, 400 + number % 7, 1e5, 50 * (number % 3), number % 3))
    return 1000 * (process_time() - begun_s) / READINGS


def _seconds_believed(factor: float) -> float:
    """Seconds of a batch of 8, which others on the machine stretch by a quarter in turns."""
    wrong, draw = StepLine(*(factor * value for value in GUESS.coefficients)), random.Random(5)
    learner, believed, true_ms = StepLearner(wrong), 0, GUESS.decode_ms(8, 8000)
    learner.begin_with(LearntTiming(wrong, wrong, error=0.04, equations=READINGS, largest_batch=8))
    for _ in range(READINGS):
        steps = round(1000 / (true_ms * draw.uniform(0.75, 1.25)))
        learner.learn(StepCounts(1000.0, steps, 8 * steps, 8000 * steps, 0, 0))
        known = learner.known
        believed += known.is_usable and abs(known.decode_ms(8, 8000) / true_ms - 1) > AIM / 100
    return float(believed)


def _json_ms() -> float:
    """What ``step_stats`` of an answer cost more than the rest of it."""
    counters = EngineCounters(*(1234.5 + number for number in range(9)))
    with_counters, without = (WorkerLoad(3, 8, counters=each) for each in (counters, None))
    return _ms_of(lambda: _read(with_counters)) - _ms_of(lambda: _read(without))


def _read(load: WorkerLoad) -> WorkerLoad:
    return WorkerLoad.from_json(json.loads(json.dumps(load.to_json())))


def _metrics_ms() -> float:
    """What the counters cost more than the other signals in vLLM's text."""
    text = (FIXTURES / "vllm" / "metrics_busy.txt").read_text()
    without = replace(METRIC_NAMES, counters=CounterNames())
    return _ms_of(lambda: read_metrics(text, METRIC_NAMES)) - _ms_of(lambda: read_metrics(text, without))


def _ms_of(work: Callable[[], object]) -> float:
    begun_s = process_time()
    for _ in range(READINGS):
        work()
    return 1000 * (process_time() - begun_s) / READINGS


MEMORY = """
import gc, psutil
import dynaplan.planner.assembly, dynaplan.planner.loop, dynaplan.planner.observer, dynaplan.planner.sla_model
from dynaplan.engines.worker_load import WorkerLoad
def mib():
    gc.collect()
    return psutil.Process().memory_full_info().uss / 2**20
before = mib()
from dynaplan.planner import step_learning
from dynaplan.engines.engine_counters import EngineCounters
from dynaplan.engines.timing_model.learnt_timing import UNKNOWN_MACHINE, StepLearner
from dynaplan.graph.lifecycle import Role
roles = {Role.DECODE: step_learning.RoleLearning(StepLearner(UNKNOWN_MACHINE))}
learning = step_learning.StepLearning(roles, None, is_needed=True)
def load(second, batch):
    counters = EngineCounters(second, 50.0 * second, 50.0 * batch * second, kv_tokens=900.0 * batch)
    return WorkerLoad(batch, 32, counters=counters)
for second in range(600):
    learning.read(Role.DECODE, {str(batch): load(second, batch) for batch in range(1, 17)})
print(mib() - before)
"""


def run_python(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def _errors(
    truth: StepTiming, gpus: int, rate: float, *, is_aggregated: bool
) -> Iterator[tuple[list[float], list[float]]]:
    """Yield the errors of a decode step and of a prompt after each of the minutes, one for each prior."""
    decode = _Learnt(truth, gpus, decodes_only=not is_aggregated)
    prefill = decode if is_aggregated else _Learnt(truth, gpus)
    draw, coming_s, number = random.Random(3), 0.0, 0
    for minutes in MINUTES:
        while coming_s < 60 * minutes:
            prompt = min(1 + int(draw.expovariate(1 / PROMPT_TOKENS)), 8000)
            answer = min(2 + int(draw.expovariate(1 / ANSWER_TOKENS)), 2000)
            for engine in {decode: None, prefill: None}:
                tokens = answer if engine is decode else 1
                engine.serve_until(coming_s)
                engine.submit(EngineRequest(str(number), prompt, tokens, is_remote=engine.decodes_only))
            number, coming_s = number + 1, coming_s + draw.expovariate(rate)
        decoded = [_decode_error(known, truth) for known in decode.known()]
        yield decoded, [_prompt_error(known, truth) for known in prefill.known()]


def _decode_error(known: LearntTiming, truth: StepTiming) -> float:
    batches = range(1, max(2, round(known.largest_batch) + 1))
    return sum(
        abs(known.decode_ms(batch, 900.0 * batch) / truth.decode_ms(batch, 900.0 * batch) - 1)
        for batch in batches
    ) / len(batches)


def _prompt_error(known: LearntTiming, truth: StepTiming) -> float:
    return abs(known.timing().prefill_ms(PROMPT_TOKENS) / truth.prefill_ms(PROMPT_TOKENS) - 1)


@dataclass(eq=False)
class _Learnt:
    """An engine, and what is learnt of it from each of the priors; its counters are read once a second."""

    truth: StepTiming
    gpus: int
    decodes_only: bool = False
    _now_s: float = 0.0
    _read_s: float = 0.0
    _spans: EngineSpans = field(default_factory=EngineSpans)

    def __post_init__(self) -> None:
        settings = EngineSettings(total_blocks=25_000, batched_tokens=2048, jitter=0.05)
        self._engine = EngineModel(settings, self.truth)
        lines = (StepLine(*(factor * value / self.gpus for value in GUESS.coefficients)) for factor in PRIORS)
        self._learners = [StepLearner(line) for line in lines]

    def known(self) -> Sequence[LearntTiming]:
        return [learner.known for learner in self._learners]

    def submit(self, request: EngineRequest) -> None:
        self._engine.submit(request)

    def serve_until(self, at_s: float) -> None:
        while self._now_s < at_s:
            duration_s = self._engine.step()
            self._now_s = at_s if duration_s is None else self._now_s + duration_s
            if self._now_s >= self._read_s:
                self._read_s = int(self._now_s) + 1
                self._learn()

    def _learn(self) -> None:
        load = self._engine.load()
        assert load.counters
        counters = replace(load.counters, at_s=self._now_s)
        if counts := self._spans.read(counters, load.running_requests):
            for learner in self._learners:
                learner.learn(counts)
