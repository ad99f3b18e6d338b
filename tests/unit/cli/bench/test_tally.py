"""Answers are counted from when they were due."""

from __future__ import annotations

import time

from dynaplan.cli.bench.measurement import Tally
from dynaplan.gateway.traced_requests import TracedRequest
from dynaplan.lab.profiling.load.completions import Answer, AnswerStream, RequestFailed
from dynaplan.simulation.outcome import Slo

ANSWER = Answer(100.9, (101.0, 102.0), prompt_tokens=30, output_tokens=11, cached_tokens=40)
REQUEST = TracedRequest(0.0, 30, 11)


def tally() -> Tally:
    return Tally(Slo(500.0, 50.0), 100.0)


def test_a_latency_counts_from_when_the_request_was_due() -> None:
    counted = tally()
    counted.answered(AnswerStream(), 100.8, ANSWER, REQUEST)
    counted.answered(AnswerStream(), 100.2, ANSWER, REQUEST)
    assert (counted.outcome.ttft_met, counted.outcome.requests) == (1, 2)
    assert counted.outcome.ttft_ms.highest > 799


def test_lengths_that_were_not_asked_for_are_counted() -> None:
    counted = tally()
    counted.answered(AnswerStream(), 100.8, ANSWER, TracedRequest(0.0, 31, 12))
    assert (counted.other_prompts, counted.other_answers) == (1, 1)
    assert counted.outcome.hit_rate == 1.0


def test_failures_are_counted_by_their_names_and_lost() -> None:
    counted = tally()
    for said in ("first", "second"):
        counted.failed(AnswerStream(), RequestFailed("503", said))
    assert (counted.failures["503"], counted.outcome.lost, counted.examples) == (2, 2, {"503": "first"})
    assert "2 failed" in counted.line(101.0, 160.0)


def test_the_live_line_has_rates_of_the_last_seconds() -> None:
    counted, stream = tally(), AnswerStream()
    counted.sent(stream, 100.0)
    counted.line(100.0, 160.0)
    counted.answered(AnswerStream(), 100.8, ANSWER, REQUEST)
    stream.event_times_s.extend([101.0] * 60)
    assert counted.line(102.0, 160.0) == (
        "00:02 of 01:00  1 open  0.5 requests/s  30 tokens/s  TTFT p50 200 p95 200 ms  "
        "ITL p50 99.9 p95 99.9 ms"
    )
    counted.failed(stream, RequestFailed("503", "none is there"))
    assert "0 tokens/s" in counted.line(108.0, None)
    assert "waiting for 0 answers" in counted.line(108.0, None)


def test_a_request_that_is_sent_late_is_counted_with_its_delay() -> None:
    counted = tally()
    counted.sent(AnswerStream(), time.perf_counter() - 7.0)
    assert 7.0 <= counted.late_s < 60.0
    assert counted.requests_sent == 1
