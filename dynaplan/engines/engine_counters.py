"""What an engine counts of its steps since its start, in one form for all engines; spans between readings.

- Simulated: all, with the time at work.
- vLLM: steps are the count of ``iteration_tokens_total``; decoded tokens ``generation_tokens_total`` less the
  count of ``time_to_first_token_seconds``, which is that of the prompts; their computed tokens are
  ``prompt_tokens_total`` less ``prefix_cache_hits_total``.
- llama.cpp: steps are ``n_decode_total``; decoded tokens steps times ``n_busy_slots_per_decode``, because
  ``tokens_predicted_total`` moves when an answer ends; prompts are not counted, so F stays in a and m.
- SGLang: ``realtime_tokens_total``, of decode and of prefill_compute, brought up to date every 40 steps;
  steps are the decoded tokens over the running requests.
- TensorRT-LLM brings its counters up to date when a request ends: nothing is learnt from it.

Sources: llama.cpp (build 10434) and vLLM 0.32 (CPU) as read from running servers, SGLang by its source. vLLM
and llama.cpp count a prompt's tokens once it is computed whole.

**Spans.** An equation covers the time from one reading to a later one: at least ``MIN_SPAN_S``, and until
``MIN_STEPS`` steps or a prompt were counted, so that the steps that its ends cut are few. An end does not cut
a prompt that is counted once it is whole, where the engine tells that one is being computed (llama.cpp's
slots), unless the span is ``LONG_SPAN_S`` long: the part would have its time in one equation and its tokens
in another, which doubled the error on a recording of llama.cpp. Where an engine does not count its time at
work, it counts as at work throughout if each reading of the span found a request running; else the span is
dropped. The context read by a step is the KV in use, in the mean of two readings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dynaplan.engines.timing_model.learnt_timing import StepCounts
from dynaplan.util.documents import number_field

MIN_SPAN_S = 0.9
LONG_SPAN_S = 10.0
MAX_SPAN_S = 60.0
MIN_STEPS = 10
"""Steps in a span below which it goes on: the two that its ends cut would be too large a part."""


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """One reading of an engine's counters since its start, at ``at_s`` by a clock that does not jump.

    ``kv_tokens`` are those in use at that moment, of ``kv_capacity_tokens`` (0: not told). ``steps`` and
    ``busy_s`` are 0 where the engine does not count them: then the running requests tell both.
    ``unfinished_prompts`` are being computed at that moment, and not counted yet.
    """

    at_s: float = 0.0
    steps: float = 0.0
    decoded_tokens: float = 0.0
    prompt_tokens: float = 0.0
    prompts: float = 0.0
    busy_s: float = 0.0
    kv_tokens: float = 0.0
    kv_capacity_tokens: float = 0.0
    unfinished_prompts: float = 0.0

    def to_json(self) -> dict[str, float]:
        return {name: value for name, value in asdict(self).items() if value}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> EngineCounters:
        """Read the mapping of ``to_json``; ValueError for a value that is no number."""
        return cls(**{name: number_field(document, name, 0.0) for name in cls.__slots__})


class EngineSpans:
    """Turns the readings of one engine's counters into equations, one for each span between two of them."""

    def __init__(self) -> None:
        self._begin: EngineCounters | None = None
        self._last: EngineCounters | None = None
        self._kv_token_steps = 0.0
        self._steps = 0.0
        self._was_running = False

    def read(self, now: EngineCounters, running: int) -> StepCounts | None:
        """Take a reading, with the number of running requests.

        Return the equation of a span that ends with it. None while the span goes on, and for one that says
        nothing: idle, cut by a prompt, or by a new start.
        """
        begin, last = self._begin, self._last
        if begin is None or last is None or _was_restarted(last, now):
            self._restart(now, running)
            return None
        if now.at_s <= last.at_s:
            return None
        steps = _steps(last, now, running)
        self._kv_token_steps += steps * (last.kv_tokens + now.kv_tokens) / 2
        self._steps += steps
        self._last = now
        is_busy = now.busy_s > 0 or (self._was_running and running > 0)
        if is_busy and self._goes_on(begin, now):
            return None
        found = self._equation(begin, now) if is_busy and self._is_whole(begin, now) else None
        self._restart(now, running)
        return found

    def _goes_on(self, begin: EngineCounters, now: EngineCounters) -> bool:
        if begin.unfinished_prompts and not now.unfinished_prompts:
            return False  # now is a better beginning, unless it is an end already
        passed_s = now.at_s - begin.at_s
        return passed_s < MIN_SPAN_S or (passed_s < MAX_SPAN_S and not self._is_whole(begin, now))

    def _is_whole(self, begin: EngineCounters, now: EngineCounters) -> bool:
        """Tell whether the steps and prompts that the span's ends cut are a small part of it."""
        has_prompt = now.prompt_tokens > begin.prompt_tokens
        cuts_a_prompt = begin.unfinished_prompts > 0 or now.unfinished_prompts > 0
        if cuts_a_prompt and not (has_prompt and now.at_s - begin.at_s >= LONG_SPAN_S):
            return False
        return self._steps >= (1 if has_prompt else MIN_STEPS)

    def _equation(self, begin: EngineCounters, end: EngineCounters) -> StepCounts:
        busy_s = end.busy_s - begin.busy_s if end.busy_s else end.at_s - begin.at_s
        return StepCounts(
            1000 * busy_s,
            self._steps,
            max(0.0, end.decoded_tokens - begin.decoded_tokens),
            self._kv_token_steps,
            end.prompt_tokens - begin.prompt_tokens,
            end.prompts - begin.prompts,
        )

    def _restart(self, now: EngineCounters, running: int) -> None:
        self._begin = self._last = now
        self._kv_token_steps = self._steps = 0.0
        self._was_running = running > 0


def _was_restarted(before: EngineCounters, now: EngineCounters) -> bool:
    steps, decoded = now.steps < before.steps, now.decoded_tokens < before.decoded_tokens
    return now.prompt_tokens < before.prompt_tokens or (steps if before.steps else decoded)


def _steps(before: EngineCounters, now: EngineCounters, running: int) -> float:
    if now.steps:
        return now.steps - before.steps
    return (now.decoded_tokens - before.decoded_tokens) / max(1, running)
