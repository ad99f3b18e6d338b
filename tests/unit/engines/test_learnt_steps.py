"""What is learnt of the steps of vLLM, SGLang and TensorRT-LLM from their metrics.

They are in ``tests/fixtures/engines``; llama.cpp's tests are in ``llamacpp/test_learnt_steps.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from dynaplan.engines.engine_counters import EngineSpans
from dynaplan.engines.machine_speed import Machine, prior_line
from dynaplan.engines.model_memory import MemoryNeed
from dynaplan.engines.registry import engine_kind
from dynaplan.engines.server.kind import ServerKind
from dynaplan.engines.server.metrics import EngineMetrics, read_metrics
from dynaplan.engines.timing_model.learnt_timing import UNKNOWN_MACHINE, LearntTiming, StepLearner

FIXTURES = Path(__file__).parents[2] / "fixtures" / "engines"
PROCESSOR = Machine("a core", 2e10, has_gpu=False)
RECORDED = MemoryNeed(weights_bytes=105e6, token_bytes=16_384, context_tokens=2048, sequences=8)


def metrics(engine: str, text: str) -> EngineMetrics:
    kind = engine_kind(engine)
    assert isinstance(kind, ServerKind)
    return read_metrics(text, kind.metric_names)


class Reader:
    """Learns from the texts of ``/metrics`` of one engine."""

    def __init__(self, engine: str, learner: StepLearner) -> None:
        self.engine, self.learner, self.spans = engine, learner, EngineSpans()

    def read(self, at_s: float, text: str) -> None:
        found = metrics(self.engine, text)
        assert found.counters
        if counts := self.spans.read(replace(found.counters, at_s=at_s), found.running):
            self.learner.learn(counts)


def rounds() -> Iterator[tuple[LearntTiming, dict[str, float]]]:
    """After each round of vLLM's recording what is known by then, and what its clients have measured."""
    reader = Reader("vllm", StepLearner(prior_line(RECORDED, PROCESSOR, 0)))
    info = 'vllm:cache_config_info{block_size="32",num_gpu_blocks="400",kv_cache_size_tokens="12800"} 1\n'
    for line in (FIXTURES / "vllm" / "steps.jsonl").read_text().splitlines():
        found = json.loads(line)
        if "streams" in found:
            yield reader.learner.known, found
        else:
            samples = "".join(f"{name} {value}\n" for name, value in found.items() if name != "at_s")
            reader.read(found["at_s"], info + samples)


def itl_error(known: LearntTiming, seen: dict[str, float]) -> float:
    """A stream's step decodes all streams; now and then it computes another one's prompt, too."""
    streams, prompt, answer = int(seen["streams"]), seen["prompt_tokens"], seen["completion_tokens"]
    decode_ms = known.decode_ms(streams, streams * (prompt + answer / 2))
    prompts_ms = (streams - 1) / answer * (known.line.prompt_ms + known.line.prompt_token_ms * prompt)
    return abs((decode_ms + prompts_ms) / seen["itl_ms"] - 1)


def test_vllms_counters_foretell_the_itl_at_one_to_eight_streams_on_a_busy_machine() -> None:
    errors = [itl_error(known, seen) for known, seen in rounds()]
    assert median(errors) < 0.12
    assert max(errors) < 0.25
    *_, (known, _) = rounds()
    assert known.error < 0.2  # single seconds were 0.3 to 2 times as long as foretold


def test_sglangs_tokens_teach_its_step_though_they_come_every_forty_steps() -> None:
    """It counts no steps: these are its decoded tokens over the running requests, 5 in the text."""
    text, step_ms = (FIXTURES / "sglang" / "metrics_decode.txt").read_text(), 20.0
    reader = Reader("sglang", StepLearner(UNKNOWN_MACHINE))
    for second in range(120):
        tokens = 5 * 40 * int(1000 * second / step_ms / 40)
        decoded = re.sub(r'(realtime_tokens_total\{[^}]*mode="decode"[^}]*\}) .*', rf"\1 {tokens}", text)
        reader.read(float(second), decoded)
    known = reader.learner.known
    assert known.is_usable
    running = metrics("sglang", text).running
    assert known.largest_batch == pytest.approx(running)
    assert known.decode_ms(running, 27_525.0) == pytest.approx(step_ms, rel=0.05)


def test_nothing_is_learnt_of_tensorrt_llm_whose_counters_move_when_requests_end() -> None:
    found = metrics("trtllm", (FIXTURES / "trtllm" / "metrics.txt").read_text())
    assert found.running == 5
    assert found.counters is None
