"""The prefill queue in virtual time: work for whichever prefill worker has asked for longest."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from dynaplan.simulator.pools import SimulatedWorker


class PrefillQueue:
    """Gives work out as JetStream does to the live workers, each of which asks for one prompt at a time.

    A worker asks while it holds fewer than ``most_held``, busy or not. ``depth`` counts like the live one:
    waiting, or taken and not acknowledged.
    """

    def __init__(self, most_held: int) -> None:
        self._most_held = most_held
        self._waiting: deque[str] = deque()
        self._asking: dict[int, SimulatedWorker] = {}
        self._taken = 0

    @property
    def depth(self) -> int:
        """How much work is not done."""
        return len(self._waiting) + self._taken

    def put(self, key: str) -> None:
        """More work."""
        self._waiting.append(key)

    def ask(self, worker: SimulatedWorker) -> None:
        """The worker wants the next prompt, if it has room for one and does not wait for one already."""
        if worker.in_flight < self._most_held:
            self._asking.setdefault(worker.number, worker)

    def given(self) -> Iterator[tuple[SimulatedWorker, str]]:
        """Who gets what now. A worker that has got something asks again, behind the others."""
        while self._waiting and self._asking:
            worker = self._asking.pop(next(iter(self._asking)))
            if not worker.is_ready:
                continue
            worker.in_flight += 1
            self._taken += 1
            self.ask(worker)
            yield worker, self._waiting.popleft()

    def acknowledge(self, worker: SimulatedWorker) -> None:
        """The worker has done one of its prompts, and asks for another one."""
        worker.in_flight -= 1
        self._taken -= 1
        self.ask(worker)
