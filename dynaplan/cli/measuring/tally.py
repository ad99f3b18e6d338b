"""The counts of a measurement, and the line that tells them while it runs."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from dynaplan.cli.measuring.answer_stream import AnswerStream, RequestFailed, TimedAnswer
from dynaplan.simulation.outcome import Outcome, Slo
from dynaplan.util.durations import clock

RECENT_S = 5.0
"""Seconds over which the rates of the live line are taken."""


class Tally:
    """Counts answers and failures of one measurement that began at ``began_s`` (``time.perf_counter``)."""

    def __init__(self, slo: Slo, began_s: float) -> None:
        self.outcome = Outcome(slo)
        self.began_s = began_s
        self.failures: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.open: set[AnswerStream] = set()
        self.sent = 0
        self.late_s = 0.0
        self.other_prompts = self.other_answers = 0
        self._whole_tokens = 0
        self._recent: deque[tuple[float, int, int]] = deque()

    def answered(self, due_s: float, answer: TimedAnswer, asked: tuple[int, int]) -> None:
        """Count an answer to a request that was due at that time; ``asked`` are tokens of prompt and answer.

        Latencies count from when the request was due, not from when it was sent: what a slow service delays
        is part of what its users wait.
        """
        outcome = self.outcome
        ttft_s, duration_s = answer.first_s - due_s, answer.last_s - due_s
        outcome.add(due_s - self.began_s, ttft_s, answer.itl_s, duration_s, answer.output_tokens)
        if answer.prompt_tokens:
            outcome.note_hits(answer.prompt_tokens, min(answer.cached_tokens, answer.prompt_tokens))
            self.other_prompts += answer.prompt_tokens != asked[0]
        self.other_answers += answer.output_tokens != asked[1]

    def failed(self, failure: RequestFailed) -> None:
        """Count a request without a whole answer."""
        kind, said = failure.args
        self.failures[kind] += 1
        self.examples.setdefault(kind, said)
        self.outcome.lost += 1

    def ended(self, stream: AnswerStream) -> None:
        """Note that a stream is over, whole or not."""
        self.open.discard(stream)
        self._whole_tokens += stream.tokens

    def line(self, now_s: float, until_s: float | None) -> str:
        """Return the live line; ``until_s`` is the end of the sending, None while answers are waited for."""
        outcome, passed_s = self.outcome, now_s - self.began_s
        tokens = self._whole_tokens + sum(stream.tokens for stream in self.open)
        self._recent.append((now_s, outcome.requests, tokens))
        while len(self._recent) > 2 and now_s - self._recent[0][0] > RECENT_S:
            self._recent.popleft()
        before_s, requests, counted = self._recent[0]
        span_s = max(now_s - before_s, 1e-9)
        parts = [
            clock(passed_s) + (f" of {clock(until_s - self.began_s)}" if until_s else ""),
            f"{len(self.open)} open" if until_s else f"waiting for {len(self.open)} answers",
            f"{(outcome.requests - requests) / span_s:.1f} requests/s",
            f"{(tokens - counted) / span_s:.0f} tokens/s",
            f"TTFT p50 {outcome.ttft_ms.percentile(50):.0f} p95 {outcome.ttft_ms.percentile(95):.0f} ms",
            f"ITL p50 {outcome.itl_ms.percentile(50):.1f} p95 {outcome.itl_ms.percentile(95):.1f} ms",
        ]
        if outcome.lost:
            parts.append(f"{outcome.lost} failed")
        return "  ".join(parts)

    def document(self) -> dict[str, Any]:
        """Return what JSON has of it beyond the table's row."""
        return {
            "sent": self.sent,
            "failures": dict(self.failures),
            "unfinished": len(self.open),
            "output_tokens": self.outcome.output_tokens,
            "late_s": round(self.late_s, 6),
        }
