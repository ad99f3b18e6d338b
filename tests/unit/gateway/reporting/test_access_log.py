"""A line for each request."""

from __future__ import annotations

from dynaplan.gateway.reporting.access_log import in_words

FIELDS = {
    "request_id": "mine",
    "outcome": "ok",
    "endpoint": "chat_completions",
    "model": "llama",
    "worker": "ns_VllmWorker",
    "input_tokens": 12,
    "output_tokens": 64,
    "ttft_ms": 48.2,
    "duration_ms": 512.0,
}


def test_a_line_says_whose_it_is_what_became_of_it_and_how_long_it_took() -> None:
    line = "request mine: ok, model llama at ns_VllmWorker, 12 + 64 tokens, TTFT 48.2 ms, 512 ms in all"
    assert in_words(FIELDS) == line


def test_what_is_not_known_is_left_out() -> None:
    line = in_words({**FIELDS, "worker": None, "ttft_ms": None, "outcome": "overload"})
    assert line == "request mine: overload, model llama, 12 + 64 tokens, 512 ms in all"
