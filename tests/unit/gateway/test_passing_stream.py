"""What passes without waking the stream's task: which events, how many tokens in them, what is kept."""

from __future__ import annotations

import time
from typing import cast

import pytest

from dynaplan.gateway.engine_answers import count_tokens
from dynaplan.gateway.metrics import FrontendMetrics
from dynaplan.gateway.migration import PAGE_BYTES, PartialAnswer, UnreadPages
from dynaplan.gateway.openai_api import CHAT_COMPLETIONS
from dynaplan.gateway.passing_stream import MAX_BEGINNING_BYTES, PassingStream
from dynaplan.http.messages import Answering
from dynaplan.routing.booking import BookEntry, WorkerBook
from tests.unit.gateway.test_engine_answers import (
    DONE,
    END,
    RECORDED,
    ROLE,
    ROLE_AND_TOKEN,
    TOKEN,
    USAGE,
)

QUOTING = b'data: {"choices":[{"index":0,"delta":{"content":"\\"a\\""}}]}\n\n'
ABORTED = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"abort"}]}\n\n'
FAILED = b'data: {"error":{}}\n\n'


class Passing:
    """A stream whose client reads, or does not."""

    def __init__(self, *, is_spliced: bool = False) -> None:
        self.sent: list[bytes] = []
        self.is_read = True
        self.partial = PartialAnswer(UnreadPages())
        self.booking = BookEntry(WorkerBook(), block_tokens=2)
        self.record = FrontendMetrics("ns", time.monotonic).record("m", "chat", is_stream=True)
        self.stream = PassingStream(
            CHAT_COMPLETIONS,
            cast(Answering, self),
            self.record,
            self.booking,
            self,
            is_spliced=is_spliced,
        )

    def is_movable(self) -> bool:
        return True

    def begin_answer(self) -> None:
        self.stream.partial = self.partial

    def write_now(self, events: bytes) -> bool:
        if self.is_read:
            self.sent.append(events)
        return self.is_read

    write_chunk_now = hold = write_now

    def tokens_of(self, events: bytes) -> int:
        before = self.record.output_tokens
        assert self.stream.pass_on(events) == b""
        assert b"".join(self.sent).endswith(events)
        return self.record.output_tokens - before


@pytest.mark.parametrize(
    "events",
    [ROLE, ROLE_AND_TOKEN, TOKEN, TOKEN + TOKEN, QUOTING, TOKEN + END, USAGE + DONE, DONE, b"\n", b": a\n\n"],
)
def test_passing_events_are_counted_unless_a_failure_may_be_among_them(events: bytes) -> None:
    passing = Passing()
    for before in (TOKEN, QUOTING, b"\n", TOKEN):
        passing.stream.pass_on(before)
        assert passing.tokens_of(events) == count_tokens(CHAT_COMPLETIONS, events)
        sent = len(passing.sent)
        for failed in (events + FAILED, TOKEN + FAILED + events, events + ABORTED):
            assert passing.stream.pass_on(failed) == failed
        assert len(passing.sent) == sent


def test_events_before_the_first_token_are_held_back_and_sent_with_it() -> None:
    passing = Passing()
    assert passing.stream.pass_on(b": a\n\n") == passing.stream.pass_on(ROLE) == b""
    assert (passing.sent, passing.stream.held, passing.stream.has_begun) == ([], b": a\n\n" + ROLE, False)
    assert passing.stream.pass_on(TOKEN) == b""
    assert (passing.sent, passing.stream.held) == ([b": a\n\n" + ROLE + TOKEN], b"")
    assert passing.record.output_tokens == 1


def test_no_more_than_some_is_held_back_of_a_stream_in_which_no_token_is_found() -> None:
    passing = Passing()
    while not passing.sent:
        assert passing.stream.pass_on(ROLE) == b""
    assert MAX_BEGINNING_BYTES < len(passing.sent[0]) <= MAX_BEGINNING_BYTES + len(ROLE)


def test_what_the_client_does_not_take_at_once_is_left_with_what_was_held_back_for_it() -> None:
    passing = Passing()
    passing.is_read = False
    assert passing.stream.pass_on(ROLE) == b""
    assert passing.stream.pass_on(TOKEN) == ROLE + TOKEN
    assert passing.stream.pass_on(TOKEN) == TOKEN


def test_nothing_passes_of_a_stream_that_is_spliced() -> None:
    passing = Passing(is_spliced=True)
    assert [passing.stream.pass_on(each) for each in (ROLE, TOKEN, TOKEN)] == [ROLE, TOKEN, TOKEN]


def test_passing_events_of_a_recorded_stream_have_its_tokens() -> None:
    for recorded in RECORDED.glob("*/c*.sse"):
        events = [each + b"\n\n" for each in recorded.read_bytes().split(b"\n\n") if each]
        passing = Passing()
        passing.stream.begin()
        counted = [passing.tokens_of(each) for each in events]
        assert counted == [count_tokens(CHAT_COMPLETIONS, each) for each in events]


def test_what_passes_is_kept_for_another_worker_and_fills_the_blocks_of_its_own() -> None:
    passing = Passing()
    for events in (ROLE, TOKEN, TOKEN, TOKEN):
        passing.stream.pass_on(events)
    assert passing.partial.text() == "aaa"
    assert passing.booking.book.active_blocks == 2
    assert passing.stream.last_events() == ROLE + 3 * TOKEN


def test_more_than_a_page_is_kept_too() -> None:
    passing = Passing()
    tokens = 3 * PAGE_BYTES // len(TOKEN)
    for _ in range(tokens):
        passing.stream.pass_on(TOKEN)
    assert passing.partial.text() == tokens * "a"


def as_chunk(events: bytes, size: str = "x") -> bytes:
    return b"%b\r\n%b\r\n" % (format(len(events), size).encode(), events)


def test_a_chunk_with_a_token_like_the_one_before_passes_as_it_came_and_is_counted_and_kept() -> None:
    passing = Passing()
    passing.stream.pass_on(TOKEN)
    for text in (b"b", b"", b"cd"):
        assert passing.stream.pass_chunk(as_chunk(TOKEN.replace(b'"a"', b'"%b"' % text)))
    assert passing.sent[1:] == [
        as_chunk(TOKEN.replace(b'"a"', b'"%b"' % text)) for text in (b"b", b"", b"cd")
    ]
    assert (passing.record.output_tokens, passing.partial.text()) == (4, "abcd")
    assert passing.booking.book.active_blocks == 2


def test_more_than_a_page_of_chunks_is_kept_too() -> None:
    passing = Passing()
    passing.stream.pass_on(TOKEN)
    tokens = 3 * PAGE_BYTES // len(TOKEN)
    assert all(passing.stream.pass_chunk(as_chunk(TOKEN)) for _ in range(tokens))
    assert passing.partial.text() == (tokens + 1) * "a"


@pytest.mark.parametrize(
    "chunk",
    [
        *(
            as_chunk(each)
            for each in (ROLE, QUOTING, TOKEN + TOKEN, END, USAGE, DONE, b"\n", ABORTED, FAILED)
        ),
        *(as_chunk(TOKEN)[:-1], as_chunk(TOKEN)[1:], as_chunk(TOKEN) + as_chunk(TOKEN), TOKEN, b""),
        *(
            as_chunk(TOKEN.replace(b'"a"', b'"ab"'), "X"),
            as_chunk(TOKEN, "03x"),
            as_chunk(TOKEN).replace(b"\r\n", b";a=b\r\n", 1),
        ),
    ],
)
def test_every_other_read_is_left_to_be_parsed_and_looked_into(chunk: bytes) -> None:
    passing = Passing()
    assert not passing.stream.pass_chunk(as_chunk(TOKEN)), "no token was seen"
    passing.stream.pass_on(TOKEN)
    assert not passing.stream.pass_chunk(chunk)
    passing.is_read = False
    assert not passing.stream.pass_chunk(as_chunk(TOKEN)), "the client does not take it at once"
    assert (len(passing.sent), passing.record.output_tokens, passing.partial.text()) == (1, 1, "a")


def test_no_chunk_passes_of_a_stream_that_is_spliced() -> None:
    passing = Passing(is_spliced=True)
    passing.stream.begin()
    passing.stream.pass_on(TOKEN)
    assert not passing.stream.pass_chunk(as_chunk(TOKEN))


def test_nothing_is_noted_of_what_the_client_does_not_take_at_once() -> None:
    passing = Passing()
    passing.is_read = False
    assert passing.stream.pass_on(TOKEN) == TOKEN
    assert (passing.record.output_tokens, passing.partial.text(), passing.stream.last_events()) == (
        0,
        "",
        b"",
    )
