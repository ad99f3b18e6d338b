"""Pass the events of one stream on to its client, as long as nothing has to be done but that.

``pass_on`` is called for every token of every stream, from the connection by which it came, and wakes no
task. It has in one function what would be one for each purpose elsewhere: a call costs more than most of
them. What it declines is handled by the stream's task: failures, a client that reads slowly, spliced events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from dynaplan.gateway.engine_answers import NO_FRAME, count_tokens, find_frame, may_report_failure
from dynaplan.gateway.metrics import RequestRecord
from dynaplan.gateway.migration import PartialAnswer
from dynaplan.gateway.openai_api import ApiPath
from dynaplan.routing.booking import BookEntry

LAST_READS = 8
"""Reads kept from the end of a stream, to find the usage in.

The last event, the usage and ``[DONE]`` may each arrive in a read of its own, with empty lines between them.
"""

_QUOTE = ord('"')  # as a number: to look for a text of one byte takes thrice as long


class PassingStream:
    """The events of one stream as they pass.

    ``write_now`` sends them, or returns False. ``partial`` keeps them, ``record`` and ``booking`` are told of
    their tokens.
    """

    def __init__(
        self,
        endpoint: ApiPath,
        write_now: Callable[[bytes], bool],
        partial: PartialAnswer | None,
        record: RequestRecord,
        booking: BookEntry,
    ) -> None:
        self._endpoint = endpoint
        self._write_now = write_now
        self._partial = partial
        self._record = record
        self._booking = booking
        self._last = deque[bytes](maxlen=LAST_READS)
        self._frame = NO_FRAME

    def pass_on(self, events: bytes) -> bool:
        """Pass whole events on; False, and nothing is done, when the stream's task has to handle them."""
        frame, tokens = self._frame, 1
        if (
            events[frame.begin] != frame.head
            or events[frame.end] != frame.tail
            or _QUOTE in events[frame.text]
        ):
            if may_report_failure(events):
                return False
            tokens = self._look_through(events)
        if not self._write_now(events):
            return False
        if partial := self._partial:
            partial.unread += events
            if len(partial.unread) > partial.room_bytes:
                partial.grow_or_read()
        self._last.append(events)
        if self._record.observe(tokens) >= self._booking.grows_at_tokens:
            self._booking.record_decoded(self._record.output_tokens)
        return True

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
