"""Sequence numbers of publishers: the events that a subscriber has missed, and those it has had already."""

from __future__ import annotations

MOST_PUBLISHERS = 4096
"""The number of publishers that are remembered: those heard last."""


class Sequences:
    """The next sequence number that is expected of each publisher."""

    def __init__(self, most: int = MOST_PUBLISHERS) -> None:
        self._most = most
        self._next: dict[int, int] = {}

    def missed(self, publisher: int, sequence: int) -> int | None:
        """Note an event; return the number of events missed before it, or None when it was had already."""
        expected = self._next.pop(publisher, 0)
        self._next[publisher] = max(expected, sequence + 1)
        if len(self._next) > self._most:
            del self._next[next(iter(self._next))]
        return sequence - expected if sequence >= expected else None
