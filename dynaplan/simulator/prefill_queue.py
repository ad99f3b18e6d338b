"""The prefill queue in virtual time: prompts go to the prefill worker that has asked for longest."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from dynaplan.simulator.pools import SimulatedWorker


class SimulatedPrefillQueue:
    """Gives prompts out as JetStream gives work to the live workers, each of which asks for one at a time.

    A worker asks while it holds fewer than ``most_held`` prompts, computing or not. Prompts that are directed
    to it come out of its own lane, at most as many at once, and before the others.
    """

    def __init__(self, most_held: int) -> None:
        self._most_held = most_held
        self._waiting: deque[str] = deque()
        self._asking: dict[int, SimulatedWorker] = {}
        self._taken = 0
        self._lanes: dict[int, tuple[SimulatedWorker, deque[str]]] = {}
        self._directed: dict[str, int] = {}

    @property
    def depth(self) -> int:
        """The number of prompts that wait, or are taken and not acknowledged: as the live queue counts."""
        return len(self._waiting) + self._taken + sum(len(keys) for _, keys in self._lanes.values())

    def put(self, key: str) -> None:
        """Add the prompt of the request with this key."""
        self._waiting.append(key)

    def direct(self, key: str, worker: SimulatedWorker) -> None:
        """Add the prompt to the worker's lane; when the worker leaves, it goes to the others."""
        self._lanes.setdefault(worker.number, (worker, deque()))[1].append(key)

    def ask(self, worker: SimulatedWorker) -> None:
        """Let the worker ask for the next prompt, if it has room for one and does not ask already."""
        if worker.book.in_flight < self._most_held:
            self._asking.setdefault(worker.number, worker)

    def assignments(self) -> Iterator[tuple[SimulatedWorker, str]]:
        """Give out what can be given now. A worker with room left asks again, behind the others."""
        for worker, keys in list(self._lanes.values()):
            yield from self._out_of_lane(worker, keys)
        while self._waiting and self._asking:
            worker = self._asking.pop(next(iter(self._asking)))
            if not worker.is_ready or self._directed_to(worker) >= self._most_held:
                continue
            worker.book.in_flight += 1
            self._taken += 1
            self.ask(worker)
            yield worker, self._waiting.popleft()

    def _out_of_lane(
        self, worker: SimulatedWorker, keys: deque[str]
    ) -> Iterator[tuple[SimulatedWorker, str]]:
        if not worker.is_ready:
            self._waiting.extend(keys)
            del self._lanes[worker.number]
            return
        while keys and self._directed_to(worker) < self._most_held:
            key = keys.popleft()
            self._directed[key] = worker.number
            worker.book.in_flight += 1
            self._taken += 1
            yield worker, key

    def _directed_to(self, worker: SimulatedWorker) -> int:
        """Count the directed prompts that the worker holds."""
        return sum(number == worker.number for number in self._directed.values())

    def acknowledge(self, worker: SimulatedWorker, key: str) -> None:
        """Note that the worker has computed that prompt, and let it ask for another one."""
        self._directed.pop(key, None)
        worker.book.in_flight -= 1
        self._taken -= 1
        self.ask(worker)
