"""Pass the events of one stream on to its client, as long as nothing has to be done but that.

``pass_on`` is called for every token of every stream, from the connection by which it came, and wakes no
task. It has in one function what would be one for each purpose elsewhere: a call costs more than most of
them. Up to the first token it holds all back. What it leaves is handled by the stream's task: failures, a
client that reads slowly, spliced events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from dynaplan.gateway.engine_answers import NO_FRAME, count_tokens, find_frame, may_report_failure
from dynaplan.gateway.metrics import RequestRecord
from dynaplan.gateway.migration import PartialAnswer
from dynaplan.gateway.openai_api import ApiPath
from dynaplan.routing.booking import BookEntry

LAST_READS = 8
"""Reads kept from the end of a stream, to find the usage in.

The last event, the usage and ``[DONE]`` may each arrive in a read of its own, with empty lines between them.
"""

MAX_BEGINNING_BYTES = 64 * 1024
"""Bytes of a stream that are held back at most while no token is found in them."""

_QUOTE = ord('"')  # as a number: to look for a text of one byte takes thrice as long


class StreamOwner(Protocol):
    """The attempt to which a stream belongs."""

    def begin_answer(self) -> None:
        """Begin the answer, at its first token."""
        ...

    def is_movable(self) -> bool:
        """Tell whether another worker can go on with the answer."""
        ...


class PassingStream:
    """The events of one attempt's stream as they pass; what is ``held`` back has no token yet.

    ``write_now`` sends them, or returns False. ``record`` and ``booking`` are told of their tokens, and
    ``partial`` keeps them. Nothing passes of a stream that ``is_spliced`` into an earlier one: its events are
    changed.
    """

    def __init__(
        self,
        endpoint: ApiPath,
        write_now: Callable[[bytes], bool],
        record: RequestRecord,
        booking: BookEntry,
        owner: StreamOwner,
        *,
        is_spliced: bool = False,
    ) -> None:
        self._endpoint = endpoint
        self._write_now = write_now
        self._record = record
        self._booking = booking
        self._owner: StreamOwner | None = owner
        self._is_spliced = is_spliced
        self._last = deque[bytes](maxlen=LAST_READS)
        self._frame = NO_FRAME
        self.partial: PartialAnswer | None = None
        self.has_begun = False
        self.held = b""

    def pass_on(self, lines: bytes) -> bytes:
        """Send whole events or hold them back, and return nothing; or return those left to the task."""
        events, frame, tokens = lines, self._frame, 1
        if (
            events[frame.begin] != frame.head
            or events[frame.end] != frame.tail
            or _QUOTE in events[frame.text]
        ):
            if self._is_spliced or may_report_failure(events):
                return events
            tokens = self._look_through(events)
            if not (self.has_begun or (events := self.hold_or_release(events, tokens))):
                return b""
        if not self._write_now(events):
            return events
        if partial := self.partial:
            partial.unread += events
            if len(partial.unread) > partial.room_bytes:
                partial.grow_or_read()
        self._last.append(events)
        if self._record.observe(tokens) >= self._booking.grows_at_tokens:
            self._booking.record_decoded(self._record.output_tokens)
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
        """Return the last events that the client was sent."""
        return b"".join(self._last)

    def _look_through(self, events: bytes) -> int:
        """Return the number of tokens in the events; if they are of a new frame, expect that from now on."""
        if frame := find_frame(events):
            self._frame = frame
            return 1
        return count_tokens(self._endpoint, events)
