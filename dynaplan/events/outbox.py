"""Messages that wait to be sent: in order, up to a bound, and beyond it the oldest are dropped."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

MOST_WAITING = 16_384
MOST_WAITING_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Outgoing:
    """One message with its subject and its id."""

    subject: str
    data: bytes
    message_id: str


@dataclass
class Outbox:
    """At most ``most`` messages of at most ``most_bytes`` together; ``dropped`` counts what was lost."""

    most: int = MOST_WAITING
    most_bytes: int = MOST_WAITING_BYTES
    dropped: int = 0
    _waiting: deque[Outgoing] = field(default_factory=deque, init=False)
    _bytes: int = field(default=0, init=False)

    def __len__(self) -> int:
        """Return the number of messages that wait."""
        return len(self._waiting)

    @property
    def is_half_full(self) -> bool:
        """True when the publisher should wait for the sender."""
        return 2 * len(self._waiting) > self.most or 2 * self._bytes > self.most_bytes

    def push(self, message: Outgoing) -> None:
        """Append a message; drop the oldest ones when there is no room."""
        self._waiting.append(message)
        self._bytes += len(message.data)
        self._make_room()

    def pop(self) -> Outgoing:
        """Take the oldest message; raises IndexError when there is none."""
        message = self._waiting.popleft()
        self._bytes -= len(message.data)
        return message

    def put_back(self, messages: Iterable[Outgoing]) -> None:
        """Put messages that were not sent before the others, in their order."""
        for message in reversed(list(messages)):
            self._waiting.appendleft(message)
            self._bytes += len(message.data)
        self._make_room()

    def _make_room(self) -> None:
        while len(self._waiting) > self.most or (self._bytes > self.most_bytes and len(self._waiting) > 1):
            self.pop()
            self.dropped += 1
