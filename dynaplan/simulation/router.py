"""The simulated router: chooses and books as the live one does, with its pure parts.

What workers have cached it knows as the live one: from ``KvIndex``, which gets every block that an engine
stores or removes, or from ``PrefixIndex``, which remembers the prompts that were sent to each worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dynaplan.config.settings.frontend import RoutingSettings
from dynaplan.routing.booking import BookEntry
from dynaplan.routing.disaggregation import route_prefill
from dynaplan.routing.kv_index import KvIndex, PrefixIndex
from dynaplan.routing.routing_logic import make_routing_logic
from dynaplan.simulation.pools import SimulatedWorker
from dynaplan.util.splitmix import UniformDraws

PREFIX_AWARE = "kv"
"""The mode that asks for prompts' cached prefixes."""


@dataclass(frozen=True)
class SimulatedRouting:
    """The options of a simulated router, a part of ``RoutingSettings``.

    ``is_kv_events``: engines report their blocks; else the router predicts them, from at most
    ``predicted_blocks`` blocks that were sent in the last ``predicted_s`` seconds.
    """

    mode: str = RoutingSettings.router
    overlap_weight: float = RoutingSettings.overlap_weight
    temperature: float = RoutingSettings.router_temperature
    is_kv_events: bool = RoutingSettings.kv_events
    predicted_s: float = RoutingSettings.router_ttl_s
    predicted_blocks: int = RoutingSettings.router_max_tree_size

    @classmethod
    def of(cls, settings: RoutingSettings) -> SimulatedRouting:
        """Return the options of a live router for a simulated one."""
        return cls(
            settings.router,
            settings.overlap_weight,
            settings.router_temperature,
            settings.kv_events,
            settings.router_ttl_s,
            settings.router_max_tree_size,
        )

    @property
    def in_words(self) -> str:
        """The mode, and for ``kv`` what it chooses by."""
        if self.mode != PREFIX_AWARE:
            return self.mode
        source = "engines' KV events" if self.is_kv_events else "prediction"
        heat = f", temperature {self.temperature:g}" if self.temperature else ""
        return f"{self.mode} by {source}, overlap weight {self.overlap_weight:g}{heat}"

    @property
    def uses_events(self) -> bool:
        """True when engines have to tell of their blocks."""
        return self.mode == PREFIX_AWARE and self.is_kv_events


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


class ReportedCaches:
    """Cache contents reported by the engines' KV events."""

    def __init__(self) -> None:
        self._index = KvIndex()

    def overlaps(
        self, hashes: Sequence[int], workers: Sequence[SimulatedWorker], now_s: float
    ) -> dict[int, int]:
        """Return how many leading blocks each worker has reported by ``now_s``; workers with none are
        absent."""
        index = self._index
        for worker in workers:
            worker.engine.publish_changes(index, worker.number, now_s)
        if len(index.workers) > len(workers):
            self._forget_others(workers)
        return index.overlaps(hashes)

    def sent(self, hashes: Sequence[int], worker: int, now_s: float) -> None:
        """Do nothing: which blocks a worker holds is reported by its engine."""

    def _forget_others(self, workers: Sequence[SimulatedWorker]) -> None:
        """Forget the workers that get no requests any more."""
        serving = {worker.number for worker in workers}
        for number in self._index.workers:
            if number not in serving:
                self._index.remove_worker(number)
        while self._index.sweep():
            pass


class PredictedCaches:
    """Cache contents predicted from the prompts that were sent."""

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


class SimulatedRouter:
    """Chooses workers for requests, one after the other, and books them.

    Where the choice ``needs_present``, engines have to be up to date: it depends on their state.
    """

    def __init__(self, routing: SimulatedRouting, seed: int) -> None:
        self.routing = routing
        self.needs_present = routing.mode != "round-robin"
        draws = UniformDraws(seed)
        self._logic = make_routing_logic(
            routing.mode, draws.__next__, routing.overlap_weight, routing.temperature
        )
        self._prefill_caches = ReportedCaches()
        self._waiting_blocks: Counter[int] = Counter()
        self._caches: Caches
        if routing.is_kv_events:
            self._caches = ReportedCaches()
        else:
            self._caches = PredictedCaches(PrefixIndex(routing.predicted_s, routing.predicted_blocks))

    def direct(
        self, block_hashes: Sequence[int], workers: Sequence[SimulatedWorker], now_s: float
    ) -> tuple[SimulatedWorker, int] | None:
        """Choose the prefill worker for a prompt by its cache, and count its blocks left to compute there.

        Return both; None for the shared queue. ``directed`` undoes the count, once the prompt does not wait
        any more.
        """
        if not (self.routing.uses_events and block_hashes):
            return None
        overlaps = self._prefill_caches.overlaps(block_hashes, workers, now_s)
        numbers = [each.number for each in workers]
        number = route_prefill(numbers, overlaps, self._waiting_blocks)
        if number is None:
            return None
        left = len(block_hashes) - overlaps[number]
        self._waiting_blocks[number] += left
        return next(each for each in workers if each.number == number), left

    def directed(self, worker: SimulatedWorker, blocks: int) -> None:
        """Take these blocks off those that prompts directed to the worker are yet to compute."""
        self._waiting_blocks[worker.number] -= blocks

    def book(
        self, block_hashes: Sequence[int], workers: Sequence[SimulatedWorker], now_s: float
    ) -> tuple[SimulatedWorker, BookEntry]:
        """Choose one of the workers for a prompt of these blocks, and book the request there."""
        turn = self._logic.choose_without_load(len(workers))
        if turn is not None:
            return workers[turn], BookEntry(workers[turn].book)
        hashes = block_hashes if self.routing.mode == PREFIX_AWARE else ()
        overlaps = self._caches.overlaps(hashes, workers, now_s) if hashes else {}
        candidates = [
            worker.book.candidate(worker.number, overlaps.get(worker.number, 0)) for worker in workers
        ]
        chosen = self._logic.choose(candidates, len(hashes))
        if hashes:
            self._caches.sent(hashes, chosen.instance_id, now_s)
        worker = next(each for each in workers if each.number == chosen.instance_id)
        return worker, BookEntry(worker.book, len(hashes), chosen.overlap_blocks)
