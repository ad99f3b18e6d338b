"""The prefill queue in virtual time: prompts go to the prefill worker that has asked for longest."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from dynaplan.simulator.pools import SimulatedWorker


class SimulatedPrefillQueue:
    """Gives prompts out as JetStream gives work to the live workers, each of which asks for one at a time.

    A worker asks while it holds fewer than ``most_held`` prompts, computing or not.
    """

    def __init__(self, most_held: int) -> None:
        self._most_held = most_held
        self._waiting: deque[str] = deque()
        self._asking: dict[int, SimulatedWorker] = {}
        self._taken = 0

    @property
    def depth(self) -> int:
        """The number of prompts that wait, or are taken and not acknowledged: as the live queue counts."""
        return len(self._waiting) + self._taken

    def put(self, key: str) -> None:
        """Add the prompt of the request with this key."""
        self._waiting.append(key)

    def ask(self, worker: SimulatedWorker) -> None:
        """Let the worker ask for the next prompt, if it has room for one and does not ask already."""
        if worker.book.in_flight < self._most_held:
            self._asking.setdefault(worker.number, worker)

    def assignments(self) -> Iterator[tuple[SimulatedWorker, str]]:
        """Give out what can be given now. A worker with room left asks again, behind the others."""
        while self._waiting and self._asking:
            worker = self._asking.pop(next(iter(self._asking)))
            if not worker.is_ready:
                continue
            worker.book.in_flight += 1
            self._taken += 1
            self.ask(worker)
            yield worker, self._waiting.popleft()

    def acknowledge(self, worker: SimulatedWorker) -> None:
        """Note that the worker has computed one of its prompts, and let it ask for another one."""
        worker.book.in_flight -= 1
        self._taken -= 1
        self.ask(worker)
