"""The line of each request in the access log, and which requests are recorded with which lengths."""

from __future__ import annotations

from typing import Any, cast

import pytest

from dynaplan.gateway.client import Client
from dynaplan.gateway.engine_answers import Usage
from dynaplan.gateway.metrics import FrontendMetrics
from dynaplan.gateway.openai_api import COMPLETIONS, Call
from dynaplan.gateway.reports import Ending, Reports, RequestReport, format_fields

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
    assert format_fields(FIELDS) == line


def test_what_is_not_known_is_left_out() -> None:
    line = format_fields({**FIELDS, "worker": None, "ttft_ms": None, "outcome": "overload"})
    assert line == "request mine: overload, model llama, 12 + 64 tokens, 512 ms in all"


class Recorded:
    """Takes what is recorded down: the lengths of each request."""

    def __init__(self) -> None:
        self.lengths: list[tuple[int, int]] = []

    def add(self, begun_s: float, prompt_tokens: int, output_tokens: int, blocks: Any) -> None:
        self.lengths.append((prompt_tokens, output_tokens))


@pytest.mark.parametrize(
    ("error_type", "streamed", "usage", "recorded"),
    [
        ("", 5, Usage(37, 7), [(37, 7)]),
        ("", 5, Usage(), [(40, 5)]),
        ("", 0, Usage(4, 0), [(4, 0)]),
        ("internal", 3, Usage(), [(40, 3)]),
        ("internal", 0, Usage(), []),
    ],
)
def test_what_failed_is_recorded_by_the_tokens_it_got_and_without_any_not(
    error_type: str, streamed: int, usage: Usage, recorded: list[tuple[int, int]]
) -> None:
    recording = Recorded()
    reports = Reports(FrontendMetrics("ns", lambda: 0.0), cast(Any, recording), logs_requests=False)
    report = RequestReport(reports, cast(Client, None), Call(COMPLETIONS, b"{}", {}, "m", True, "hi", 40))
    report.record.observe(streamed)
    report.end(Ending(error_type, 40, usage))
    assert recording.lengths == recorded
