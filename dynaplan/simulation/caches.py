"""The simulated router's knowledge of the workers' caches: told by their engines, or predicted.

Both are the live router's: ``KvIndex`` hears of every block that an engine stores or removes, and
``PrefixIndex`` remembers the prompts that were sent to each worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dynaplan.gateway.kv_routing.kv_index import KvIndex
from dynaplan.gateway.kv_routing.prefix_index import PrefixIndex
from dynaplan.simulation.pools import SimulatedWorker


class Caches(Protocol):
    """The router's knowledge of the caches. Workers go by their numbers; times are virtual seconds."""

    def overlaps(
        self, hashes: Sequence[int], workers: Sequence[SimulatedWorker], now_s: float
    ) -> dict[int, int]:
        """Return the number of first blocks that each of the workers has in its cache; absent if none."""
        ...

    def sent(self, hashes: Sequence[int], worker: int, now_s: float) -> None:
        """Note that a prompt of these blocks was sent to that worker."""
        ...


class ToldCaches:
    """Caches as the engines tell of them."""

    def __init__(self) -> None:
        self._index = KvIndex()

    def overlaps(
        self, hashes: Sequence[int], workers: Sequence[SimulatedWorker], now_s: float
    ) -> dict[int, int]:
        """Return the number of first blocks that each worker has told of; absent if none."""
        index = self._index
        for worker in workers:
            worker.engine.tell_changes(index, worker.number, now_s)
        if len(index.workers) > len(workers):
            self._forget_others(workers)
        return index.overlaps(hashes)

    def sent(self, hashes: Sequence[int], worker: int, now_s: float) -> None:
        """Do nothing: the engine will tell."""

    def _forget_others(self, workers: Sequence[SimulatedWorker]) -> None:
        """Forget the workers that get no requests any more."""
        serving = {worker.number for worker in workers}
        for number in self._index.workers:
            if number not in serving:
                self._index.left(number)
        while self._index.sweep():
            pass


class PredictedCaches:
    """Caches as the prompts that were sent make them probable."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def overlaps(
        self, hashes: Sequence[int], workers: Sequence[SimulatedWorker], now_s: float
    ) -> dict[int, int]:
        """Return the number of first blocks that each worker probably holds; absent if none."""
        return self._index.overlaps(hashes, now_s)

    def sent(self, hashes: Sequence[int], worker: int, now_s: float) -> None:
        """Note that a prompt of these blocks was sent to that worker."""
        self._index.record(hashes, worker, now_s)
