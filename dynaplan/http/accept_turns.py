"""Which of the processes on one listening socket takes the next connection: one that has few.

Each shares the number of its open connections. One with more than a sixteenth more than the fewest leaves the
next to the others for a moment, but not for ever: when the one with the fewest has not looked for
``MOST_LEFT`` moments it may hang, and nothing more is left to it before it looks again. Its connections alone
do not tell: with short ones there is never any open.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from dynaplan.http.timing import OTHER_ACCEPTORS_POLL_S
from dynaplan.util.shared_words import SharedWords

MOST_LEFT = 20


class Shared(NamedTuple):
    """What a process tells the others: its open connections, and how often it has looked for a new one."""

    connections: int
    looks: int


class FairPart:
    """Decides for one process whether it leaves a connection to others that have fewer.

    It remembers how many connections it has left in a row, and takes the next one after MOST_LEFT.
    """

    def __init__(self) -> None:
        self._fewest: Shared | None = None
        self._left = 0

    def leaves_next(self, own: int, others: Iterable[Shared]) -> bool:
        """Tell whether to leave the next connection to the others.

        ``own`` is the number of open connections of this process.
        """
        fewest = min(others, default=None)
        if fewest is None or own - own // 16 <= fewest.connections:
            return False
        if fewest != self._fewest:
            self._fewest, self._left = fewest, 0
        self._left += 1
        return self._left <= MOST_LEFT


class AcceptTurns:
    """Shares the numbers of connections among the processes that accept on one socket, and takes turns.

    ``directory`` is the one that all these processes share.
    """

    def __init__(self, directory: Path) -> None:
        self._shared = SharedWords(directory, 2)
        self._part = FairPart()
        self._look_at_s = 0.0

    def leaves_next(self, connections: int) -> bool:
        """Share the number of open connections of this process; tell whether others are to take the next."""
        if (now_s := time.monotonic()) >= self._look_at_s:
            self._look_at_s = now_s + OTHER_ACCEPTORS_POLL_S
            self._shared.look_for_others()
        mine = self._shared.mine
        mine[0], mine[1] = connections, mine[1] + 1
        return self._part.leaves_next(connections, [Shared(*each) for each in self._shared.others.values()])

    def close(self) -> None:
        """Withdraw this process's numbers, so that the others leave no connections to it."""
        self._shared.close()
