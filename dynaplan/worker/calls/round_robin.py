"""Turns: the order in which a client of an endpoint asks its instances."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def in_turn(instance_ids: Sequence[int], last: int) -> tuple[int, ...]:
    """Return the ids in the order of a round: the first above ``last``, then upwards, then from the lowest.

    The next call passes the first of them as ``last``. So an instance that stays is asked once between any
    two calls that begin with the same other one, whichever instances come and go meanwhile.
    """
    ring = sorted(instance_ids)
    begin = bisect_right(ring, last)
    return (*ring[begin:], *ring[:begin])
