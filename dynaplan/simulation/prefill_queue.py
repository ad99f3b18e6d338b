"""The prefill queue in virtual time: prompts go to the prefill worker that has asked for longest.

They go in the order of arrival, or by deadline (``events/dispatch_order.py``).
"""

from __future__ import annotations

import math
from collections import deque

from dynaplan.events.dispatch_order import DispatchRule, UsualTime
from dynaplan.simulation.pools import SimulatedWorker

ALWAYS_IN_TIME = (0.0, math.inf)
"""The times of a prompt without a deadline."""


class SimulatedPrefillQueue:
    """Gives prompts out as JetStream gives work to the live workers, each of which asks for one at a time.

    A worker asks while it holds fewer than ``most_held`` prompts, computing or not. Prompts that are directed
    to one worker wait in a queue of its own (its lane); it holds at most ``most_held`` of these at once, and
    they come before the others. With a ``rule`` the shared queue is dispatched by deadline.
    """

    def __init__(self, most_held: int, rule: DispatchRule | None = None) -> None:
        self._most_held = most_held
        self._rule = rule
        self._late: deque[str] = deque()
        self._times_s: dict[str, tuple[float, float]] = {}
        self._taken_s: dict[str, float] = {}
        self._computing = UsualTime()
        self._since_owed = 0
        self._waiting: deque[str] = deque()
        self._asking: dict[int, SimulatedWorker] = {}
        self._holders: dict[str, SimulatedWorker] = {}
        self._in_vain: set[str] = set()
        self._lanes: dict[int, tuple[SimulatedWorker, deque[str]]] = {}
        self._directed: dict[str, int] = {}

    @property
    def depth(self) -> int:
        """The number of prompts that wait, or are taken and not acknowledged: as the live queue counts."""
        lanes = self._lanes
        in_lanes = sum(len(keys) for _, keys in lanes.values()) if lanes else 0
        return len(self._waiting) + len(self._late) + len(self._holders) + in_lanes

    def put(self, key: str, times_s: tuple[float, float] = ALWAYS_IN_TIME) -> None:
        """Add the prompt of the request with this key; ``times_s`` are its arrival and its deadline."""
        self._times_s[key] = times_s
        self._waiting.append(key)

    def direct(
        self, key: str, worker: SimulatedWorker, times_s: tuple[float, float] = ALWAYS_IN_TIME
    ) -> None:
        """Add the prompt to the worker's own queue; when the worker leaves, it goes to the shared one."""
        self._times_s[key] = times_s
        self._lanes.setdefault(worker.number, (worker, deque()))[1].append(key)

    def ask(self, worker: SimulatedWorker) -> None:
        """Let the worker ask for the next prompt, if it has room for one and does not ask already."""
        if worker.book.in_flight < self._most_held:
            self._asking.setdefault(worker.number, worker)

    def assign(self, now_s: float = 0.0) -> tuple[SimulatedWorker, str] | None:
        """Give a prompt to a worker that asks; return both, None where nothing can be given.

        A worker with room left asks again, behind the others.
        """
        assigned = (self._out_of_lanes() if self._lanes else None) or self._out_of_queue(now_s)
        if assigned:
            worker, key = assigned
            worker.book.in_flight += 1
            self._taken_s[key], self._holders[key] = now_s, worker
            if key not in self._directed:
                self.ask(worker)
        return assigned

    def holder(self, key: str) -> SimulatedWorker:
        """Return the worker that has taken the prompt and not acknowledged it."""
        return self._holders[key]

    def computed(self, key: str, at_s: float) -> bool:
        """Note that the prompt is computed; tell whether its request still waits for the hand-over."""
        self._computing = self._computing.after(at_s - self._taken_s.pop(key, at_s))
        self._times_s.pop(key, None)
        is_wanted = key not in self._in_vain
        self._in_vain.discard(key)
        return is_wanted

    def give_up(self, key: str) -> None:
        """Remove the prompt, for which its request no longer waits.

        One that is being computed is so in vain.
        """
        lanes = (keys for _, keys in self._lanes.values())
        place = next((keys for keys in (self._waiting, self._late, *lanes) if key in keys), None)
        if place is None:
            self._in_vain.add(key)
        else:
            place.remove(key)
            del self._times_s[key]

    def _out_of_queue(self, now_s: float) -> tuple[SimulatedWorker, str] | None:
        asking = self._asking
        while asking and (self._waiting or self._late):
            worker = asking.pop(next(iter(asking)))
            if worker.is_ready and not (self._directed and self._directed_to(worker) >= self._most_held):
                return worker, self._next(now_s)
        return None

    def _next(self, now_s: float) -> str:
        """Take the next prompt out of the shared queue, which is not empty; return its request's key."""
        rule, waiting, late, times_s = self._rule, self._waiting, self._late, self._times_s
        if rule is None:
            return waiting.popleft()
        while waiting and rule.is_late(*times_s[waiting[0]], now_s, self._computing.usual_s):
            late.append(waiting.popleft())
        oldest_s = times_s[late[0]][1] if late else None
        any_in_time = bool(waiting)
        takes_late = rule.takes_late(oldest_s, now_s, any_in_time=any_in_time, since_owed=self._since_owed)
        self._since_owed = 0 if takes_late and any_in_time else self._since_owed + 1
        return late.popleft() if takes_late else waiting.popleft()

    def _out_of_lanes(self) -> tuple[SimulatedWorker, str] | None:
        for worker, keys in list(self._lanes.values()):
            if not worker.is_ready:
                self._waiting.extend(keys)
                del self._lanes[worker.number]
            elif keys and self._directed_to(worker) < self._most_held:
                key = keys.popleft()
                self._directed[key] = worker.number
                return worker, key
        return None

    def _directed_to(self, worker: SimulatedWorker) -> int:
        """Return how many prompts that were directed to the worker it holds."""
        return sum(number == worker.number for number in self._directed.values())

    def acknowledge(self, key: str) -> SimulatedWorker:
        """Note that its holder has computed the prompt, and let it ask for another; return the holder."""
        worker = self._holders.pop(key)
        self._directed.pop(key, None)
        worker.book.in_flight -= 1
        self.ask(worker)
        return worker
