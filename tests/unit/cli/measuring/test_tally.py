"""Answers are counted from when they were due."""

from __future__ import annotations

from dynaplan.cli.measuring.answer_stream import AnswerStream, RequestFailed, TimedAnswer
from dynaplan.cli.measuring.tally import Tally
from dynaplan.simulation.outcome import Slo

ANSWER = TimedAnswer(first_s=101.0, last_s=102.0, prompt_tokens=30, output_tokens=11, cached_tokens=40)


def tally() -> Tally:
    return Tally(Slo(500.0, 50.0), 100.0)


def test_a_latency_counts_from_when_the_request_was_due() -> None:
    counted = tally()
    counted.answered(100.8, ANSWER, (30, 11))
    counted.answered(100.2, ANSWER, (30, 11))
    assert (counted.outcome.ttft_met, counted.outcome.requests) == (1, 2)
    assert counted.outcome.ttft_ms.highest > 799


def test_lengths_that_were_not_asked_for_are_counted() -> None:
    counted = tally()
    counted.answered(100.8, ANSWER, (31, 12))
    assert (counted.other_prompts, counted.other_answers) == (1, 1)
    assert counted.outcome.hit_rate == 1.0


def test_failures_are_counted_by_their_names_and_lost() -> None:
    counted = tally()
    for said in ("first", "second"):
        counted.failed(RequestFailed("503", said))
    assert (counted.failures["503"], counted.outcome.lost, counted.examples) == (2, 2, {"503": "first"})
    assert "2 failed" in counted.line(101.0, 160.0)


def test_the_live_line_has_rates_of_the_last_seconds() -> None:
    counted, stream = tally(), AnswerStream()
    counted.open.add(stream)
    counted.line(100.0, 160.0)
    counted.answered(100.8, ANSWER, (30, 11))
    stream.tokens = 60
    assert counted.line(102.0, 160.0) == (
        "00:02 of 01:00  1 open  0.5 requests/s  30 tokens/s  TTFT p50 200 p95 200 ms  "
        "ITL p50 99.9 p95 99.9 ms"
    )
    counted.ended(stream)
    assert "0 tokens/s" in counted.line(108.0, None)
    assert "waiting for 0 answers" in counted.line(108.0, None)
