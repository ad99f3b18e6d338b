"""A publisher's events by number: the latest ones kept for replay, and a subscriber that follows them.

A subscriber hears the events as they are published (*live*), of which some may be lost, and can ask the
publisher for those from a number or a time on. What it delivers has rising numbers, each at most once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Generic, TypeVar

from dynaplan.events.envelope import Envelope

MOST_HELD = 10_000
"""Live events held back while earlier ones are asked for; with more the earlier ones are given up."""

T = TypeVar("T")


class ReplayBuffer:
    """The last events of one publisher: ``most`` at most, of ``most_bytes`` and ``age_ms`` at most."""

    def __init__(self, most: int, most_bytes: int, age_ms: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._age_ms = age_ms
        self._kept: deque[Envelope] = deque()
        self._bytes = 0
        self.next_sequence = 0
        """The number of the next event."""

    def append(self, event: Envelope) -> None:
        """Keep the event, whose number is ``next_sequence``, and forget what no longer has room."""
        self.next_sequence = event.sequence + 1
        self._kept.append(event)
        self._bytes += len(event.payload)
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self._forget()
        self.expire(event.published_at)

    def expire(self, now_ms: int) -> None:
        """Forget the events that are older than the time for which events are kept; ``now_ms`` since 1970."""
        while self._kept and self._kept[0].published_at < now_ms - self._age_ms:
            self._forget()

    def since(self, sequence: int, most: int) -> list[Envelope]:
        """Return the first ``most`` events with that number or a later one."""
        skipped = max(0, sequence - self._kept[0].sequence) if self._kept else 0
        return list(islice(self._kept, skipped, skipped + most))

    def number_at(self, unix_ms: int) -> int:
        """Return the number of the first event that was published then or later."""
        return next(
            (event.sequence for event in self._kept if event.published_at >= unix_ms), self.next_sequence
        )

    def _forget(self) -> None:
        self._bytes -= len(self._kept.popleft().payload)


class ChannelFollower(Generic[T]):
    """The events of one publisher in their order; ``deliver(event)`` is called with each.

    ``start`` is the number to begin with; None: the first one that is heard, or with ``awaits_replay`` the
    first one of the first answer.
    """

    def __init__(
        self,
        deliver: Callable[[T], None],
        start: int | None = None,
        *,
        awaits_replay: bool = False,
        most_held: int = MOST_HELD,
    ) -> None:
        self._deliver = deliver
        self._awaits_replay = awaits_replay
        self._most_held = most_held
        self._held: dict[int, T] = {}
        self.next = start
        """The number of the next event to deliver; None: any."""

    @property
    def has_gap(self) -> bool:
        """True when later events have come than the next one."""
        return bool(self._held)

    def live(self, number: int, event: T) -> None:
        """Take an event as it was published."""
        if self.next is None and not self._awaits_replay:
            self.next = number
        if number == self.next:
            self._take(number, event)
            self._release()
        elif self.next is None or number > self.next:
            self._held[number] = event
            if len(self._held) > self._most_held:
                self._advance(min(self._held))

    def replayed(self, number: int, event: T) -> None:
        """Take an event that was asked for; the publisher has none between the one before and this."""
        if self.next is None or number >= self.next:
            self._advance(number)
            if self.next == number:
                self._take(number, event)
                self._release()

    def replayed_until(self, number: int) -> None:
        """Note that the publisher has sent all that it has with smaller numbers."""
        if self.next is None or number > self.next:
            self._advance(number)

    def _advance(self, number: int) -> None:
        """Give up what has not come with smaller numbers."""
        for each in sorted(held for held in self._held if held < number):
            self._take(each, self._held[each])
        self.next = number
        self._release()

    def _take(self, number: int, event: T) -> None:
        self.next = number + 1
        self._held.pop(number, None)
        self._deliver(event)

    def _release(self) -> None:
        """Deliver what was held back for the event that has come."""
        while self.next in self._held:
            self._take(self.next, self._held[self.next])
