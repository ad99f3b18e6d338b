"""Whether a request goes to a worker at once where a planner limits the requests that run there.

The limit bends before a request is harmed: it holds one back only while a worker is expected to end enough of
its requests in time (``planner/sizing/running_limit.py`` says what in time is).
"""

from __future__ import annotations

from collections.abc import Sequence

from dynaplan.contract.running_limits import RunningLimit


def free_places(limit: RunningLimit, running: Sequence[int]) -> int:
    """Return how many more requests these workers may get; ``running`` is the number on each."""
    return sum(max(0, limit.most - number) for number in running)


def must_wait(limit: RunningLimit, running: Sequence[int], waiting: int) -> bool:
    """Tell whether a request has to wait for a place at one of these workers, behind ``waiting`` others.

    Not where there is a place for it, and not where waiting is in vain: until it has one, all that run beyond
    the limit have to end, and one request for each that waits before it.
    """
    free = free_places(limit, running)
    if free > waiting:
        return False
    beyond = sum(max(0, number - limit.most) for number in running)
    ends = limit.ends_per_s * limit.wait_s * len(running)
    return beyond + waiting - free + 1 <= ends
