"""Which of the processes on one listening socket takes how many of the connections that wait: an equal part.

Each publishes the number of its connections, and takes what it lacks to an equal part of all, open and
waiting. One that has its part leaves the rest to the others for a moment; there is always one that has less.
It may hang: when something was left to it ``MAX_LEFT_TO_SILENT`` times and it has not looked, it is left out,
and so are its connections, until it looks again. Its connections alone do not tell: with short ones there are
never any open.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dynaplan.http.timing import OTHER_ACCEPTORS_POLL_S
from dynaplan.util.shared_words import SharedWords

MAX_LEFT_TO_SILENT = 20
"""Times that something is left to a process that has not looked since; then it is left out."""


class Shared(NamedTuple):
    """What a process tells the others: its open connections, and how often it has looked for new ones."""

    connections: int
    looks: int


class EqualPart:
    """Decides for one process how many of the waiting connections it takes."""

    def __init__(self) -> None:
        self._left: dict[tuple[str, int], int] = {}
        """Name of a process, and how often it has looked -> how often something was left to it since."""

    def lacking(self, own: int, waiting: int, others: Mapping[str, Shared]) -> int:
        """Return how many of the ``waiting`` connections are to be taken; 0 leaves all to the others.

        ``own`` is the number of open connections of this process; ``others`` are those by name.
        """
        looks = {(name, each.looks): each for name, each in others.items()}
        awake = [each for look, each in looks.items() if self._left.get(look, 0) < MAX_LEFT_TO_SILENT]
        of_all = own + waiting + sum(each.connections for each in awake)
        part = -(-of_all // (1 + len(awake)))
        if waiting and part <= own:
            self._left = {look: self._left.get(look, 0) + 1 for look in looks}
        return min(waiting, max(0, part - own))


class AcceptShares:
    """Shares the numbers of connections among the processes that accept on one socket.

    ``directory`` is the one that all these processes share; without one there is only this process.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._shared = SharedWords(directory, 2)
        self._part = EqualPart()
        self._look_at_s = 0.0

    def publish(self, connections: int) -> None:
        """Tell the others the number of open connections of this process."""
        self._shared.mine[0] = connections

    def lacking(self, connections: int, waiting: int) -> int:
        """Share the number of open connections; return how many of the waiting ones are to be taken."""
        if (now_s := time.monotonic()) >= self._look_at_s:
            self._look_at_s = now_s + OTHER_ACCEPTORS_POLL_S
            self._shared.look_for_others()
        self.publish(connections)
        self._shared.mine[1] += 1
        others = {name: Shared(*words) for name, words in self._shared.others.items()}
        return self._part.lacking(connections, waiting, others)

    def close(self) -> None:
        """Withdraw this process's numbers, so that the others leave no connections to it."""
        self._shared.close()
