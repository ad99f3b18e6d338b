"""Pass the events of one stream on to its client, as long as nothing has to be done but that.

1. ``pass_chunk`` is called for nearly every token of every stream, by the connection that received it, and
   wakes no task. It recognizes a token without searching for it (``TokenFrame``), sends the engine's chunk as
   it came, and calls no function where a line will do. More than half of its time is spent waiting for
   memory: among hundreds of streams, the objects of one are no longer in the processor's caches when its next
   token comes. So it reads as few of them as it can, and all have slots (decision 0079).
2. ``pass_on`` is called for all else, looks the events through for tokens and failures, and up to the first
   token holds all back.
3. What they leave is handled by the stream's task: failures, a client that reads slowly, spliced events.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from dynaplan.gateway.engine_answers import NO_FRAME, count_tokens, find_frame, may_report_failure
from dynaplan.gateway.metrics import RequestRecord
from dynaplan.gateway.migration import PartialAnswer
from dynaplan.gateway.openai_api import ApiPath
from dynaplan.http.messages import Answering
from dynaplan.routing.booking import BookEntry

LAST_READS = 8
"""Reads kept from the end of a stream, to find the usage in; not those of ``pass_chunk``, which state none.

The last event, the usage and ``[DONE]`` may each arrive in a read of its own, with empty lines between them.
"""

MAX_BEGINNING_BYTES = 64 * 1024
"""Bytes of a stream that are held back at most while no token is found in them."""

_LINE_END = b"\r\n"
_LAST_TWO = slice(-2, None)
_QUOTE = ord('"')  # to look for bytes of length one takes three times as long as to look for a number


class StreamOwner(Protocol):
    """The attempt to which a stream belongs."""

    def begin_answer(self) -> None:
        """Begin the answer, at its first token or where too much is held back."""
        ...

    def is_movable(self) -> bool:
        """Tell whether another worker can go on with the answer."""
        ...


class PassingStream:
    """The events of one attempt's stream as they pass; what is ``held`` back has no token yet.

    ``connection`` is the client's. ``record`` and ``booking`` are told of their tokens, and
    ``partial`` keeps them. Nothing passes of a stream that ``is_spliced`` into an earlier one: its events are
    changed.
    """

    __slots__ = (
        *("_booking", "_connection", "_endpoint", "_frame", "_grows_at_tokens", "_head", "_is_spliced"),
        *("_last", "_owner", "_record", "has_begun", "held", "partial"),
    )

    def __init__(
        self,
        endpoint: ApiPath,
        connection: Answering,
        record: RequestRecord,
        booking: BookEntry,
        owner: StreamOwner,
        *,
        is_spliced: bool = False,
    ) -> None:
        self._endpoint = endpoint
        self._connection = connection
        self._record = record
        self._booking = booking
        self._grows_at_tokens: float = 0  # that of the booking, which only rises: one object less to read
        self._owner: StreamOwner | None = owner
        self._is_spliced = is_spliced
        self._last = deque[bytes](maxlen=LAST_READS)
        self._head, self._frame = NO_FRAME
        self.partial: PartialAnswer | None = None
        self.has_begun = False
        self.held = b""

    def pass_chunk(self, chunk: bytes) -> bool:
        """Send a chunk with one token, framing and all, if it looks like the last one that ``pass_on`` saw.

        False, and nothing is sent or counted, for any other, and before the stream has begun or after it is
        spliced: then ``pass_on`` has seen none.
        """
        frame, size = self._frame, chunk.find(_LINE_END)
        events = chunk[size + 2 : -2]
        if (
            events[frame.begin] != self._head
            or events[frame.end] != frame.tail
            or _QUOTE in events[frame.text]
            or chunk[:size] != b"%x" % len(events)
            or chunk[_LAST_TWO] != _LINE_END
            or not self._connection.write_chunk_now(chunk)
        ):
            return False
        if partial := self.partial:
            partial.unread += events
            if len(partial.unread) > partial.room_bytes:
                partial.grow_or_read()
        if (tokens := self._record.observe(1)) >= self._grows_at_tokens:
            self._booking.record_decoded(tokens)
            self._grows_at_tokens = self._booking.grows_at_tokens
        return True

    def pass_on(self, lines: bytes, *, is_last: bool = False) -> bytes:
        """Send whole events or hold them back, and return nothing; or return those left to the task.

        The last ones go with the end of the client's stream, in one write.
        """
        if self._is_spliced or may_report_failure(lines):
            return lines
        tokens = self._look_through(lines)
        events = self.hold_or_release(lines, tokens)
        if not events:
            return b""
        is_taken = self._connection.hold(events) if is_last else self._connection.write_now(events)
        if not is_taken:
            return events
        if self.partial:
            self.partial.add(events)
        self._last.append(events)
        self._booking.record_decoded(self._record.observe(tokens))
        return b""

    def hold_or_release(self, events: bytes, tokens: int) -> bytes:
        """Hold events back until the first token, or ``MAX_BEGINNING_BYTES``; return what is to be sent."""
        if self.has_begun:
            return events
        self.held += events
        return self.begin() if tokens or len(self.held) > MAX_BEGINNING_BYTES else b""

    def begin(self) -> bytes:
        """Begin the answer; return what was held back of it."""
        assert self._owner
        self._owner.begin_answer()
        self.has_begun = True
        events, self.held = self.held, b""
        return events

    def is_movable(self) -> bool:
        """Tell whether another worker can go on with the stream, should this one stand still."""
        return self.has_begun and self._owner is not None and self._owner.is_movable()

    def drop_owner(self) -> None:
        """Let go of the owner, which leads back here: work for the garbage collector."""
        self._owner = None

    def record_sent(self, events: bytes, tokens: int) -> None:
        """Record events with so many tokens that the client was sent by the stream's task."""
        self._last.append(events)
        self._booking.record_decoded(self._record.observe(tokens))

    def last_events(self) -> bytes:
        """Return the last events for the client, except the tokens that passed as chunks."""
        return b"".join(self._last)

    def _look_through(self, events: bytes) -> int:
        """Return the number of tokens in the events; if they are of a new frame, expect that from now on."""
        if found := find_frame(events):
            self._head, self._frame = found
            return 1
        return count_tokens(self._endpoint, events)
