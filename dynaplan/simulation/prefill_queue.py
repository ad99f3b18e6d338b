"""The prefill queue in virtual time: prompts go to the prefill worker that has asked for longest.

They go in the order of arrival, or by deadline (``events/dispatch_order.py``).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Generic, TypeVar

from dynaplan.events.dispatch_order import DispatchRule, UsualTime
from dynaplan.simulation.pools import SimulatedWorker


class QueuedPrompt:
    """A prompt of the queue; ``key`` is its request's. It arrived at ``arrival_s``, in seconds, and is to be
    computed by ``deadline_s``.

    A worker has it from ``taken_s`` on. ``is_directed``: out of the worker's own queue. ``is_given_up``: its
    request no longer waits, it is computed in vain.
    """

    __slots__ = ("arrival_s", "deadline_s", "is_directed", "is_given_up", "key", "taken_s", "worker")

    def __init__(self, key: str, arrival_s: float = 0.0, deadline_s: float = math.inf) -> None:
        self.key = key
        self.arrival_s = arrival_s
        self.deadline_s = deadline_s
        self.worker: SimulatedWorker | None = None
        self.taken_s = 0.0
        self.is_directed = self.is_given_up = False


Prompt = TypeVar("Prompt", bound=QueuedPrompt)


class SimulatedPrefillQueue(Generic[Prompt]):
    """Gives prompts out as JetStream gives work to the live workers, each of which asks for one at a time.

    A worker asks while it holds fewer than ``most_held`` prompts, computing or not. Prompts that are directed
    to one worker wait in a queue of its own (its lane); it holds at most ``most_held`` of these at once, and
    they come before the others. With a ``rule`` the shared queue is dispatched by deadline. As the live queue
    counts, ``depth`` is the number of prompts that wait, or are taken and not acknowledged.
    """

    def __init__(self, most_held: int, rule: DispatchRule | None = None) -> None:
        self._most_held = most_held
        self._rule = rule
        self._late: deque[Prompt] = deque()
        self._computing = UsualTime()
        self._since_owed = 0
        self._waiting: deque[Prompt] = deque()
        self._asking: dict[int, SimulatedWorker] = {}
        self._taken: dict[str, Prompt] = {}
        self._lanes: dict[int, tuple[SimulatedWorker, deque[Prompt]]] = {}
        self._directed: Counter[int] = Counter()
        self.depth = 0

    def put(self, prompt: Prompt) -> None:
        """Add the prompt to the shared queue."""
        self._waiting.append(prompt)
        self.depth += 1

    def direct(self, prompt: Prompt, worker: SimulatedWorker) -> None:
        """Add the prompt to the worker's own queue; when the worker leaves, it goes to the shared one."""
        self._lanes.setdefault(worker.number, (worker, deque()))[1].append(prompt)
        self.depth += 1

    def ask(self, worker: SimulatedWorker) -> None:
        """Let the worker ask for the next prompt, if it has room for one and does not ask already."""
        if worker.book.in_flight < self._most_held:
            self._asking.setdefault(worker.number, worker)

    def assign(self, now_s: float = 0.0) -> tuple[SimulatedWorker, Prompt] | None:
        """Give a prompt to a worker that asks; return both, None where nothing can be given.

        A worker with room left asks again, behind the others.
        """
        assigned = self._out_of_lanes() if self._lanes else None
        if not assigned and self._asking and (self._waiting or self._late):
            assigned = self._out_of_queue(now_s)
        if not assigned:
            return None
        worker, prompt = assigned
        worker.book.in_flight += 1
        prompt.worker, prompt.taken_s = worker, now_s
        self._taken[prompt.key] = prompt
        if not prompt.is_directed:
            self.ask(worker)
        return assigned

    def computed(self, key: str, at_s: float) -> Prompt:
        """Note that a worker has computed the prompt of that key, and return it."""
        prompt = self._taken[key]
        self._computing = self._computing.after(at_s - prompt.taken_s)
        return prompt

    def give_up(self, prompt: Prompt) -> None:
        """Remove the prompt, for which its request no longer waits.

        One that is being computed is so in vain.
        """
        if prompt.worker:
            prompt.is_given_up = True
            return
        lanes = (prompts for _, prompts in self._lanes.values())
        next(each for each in (self._waiting, self._late, *lanes) if prompt in each).remove(prompt)
        self.depth -= 1

    def _out_of_queue(self, now_s: float) -> tuple[SimulatedWorker, Prompt] | None:
        asking, most = self._asking, self._most_held
        while asking:
            worker = asking.pop(next(iter(asking)))
            if worker.is_ready and not (self._directed and self._directed[worker.number] >= most):
                return worker, self._next(now_s)
        return None

    def _next(self, now_s: float) -> Prompt:
        """Take the next prompt out of the shared queue, which is not empty."""
        rule, waiting, late = self._rule, self._waiting, self._late
        if rule is None:
            return waiting.popleft()
        usual_s = self._computing.usual_s
        while waiting and rule.is_late(waiting[0].arrival_s, waiting[0].deadline_s, now_s, usual_s):
            late.append(waiting.popleft())
        if not late:
            self._since_owed += 1
            return waiting.popleft()
        any_in_time, oldest_s = bool(waiting), late[0].deadline_s
        takes_late = rule.takes_late(oldest_s, now_s, any_in_time=any_in_time, since_owed=self._since_owed)
        self._since_owed = 0 if takes_late and any_in_time else self._since_owed + 1
        return late.popleft() if takes_late else waiting.popleft()

    def _out_of_lanes(self) -> tuple[SimulatedWorker, Prompt] | None:
        for worker, prompts in list(self._lanes.values()):
            if not worker.is_ready:
                self._waiting.extend(prompts)
                del self._lanes[worker.number]
            elif prompts and self._directed[worker.number] < self._most_held:
                prompt = prompts.popleft()
                prompt.is_directed = True
                self._directed[worker.number] += 1
                return worker, prompt
        return None

    def acknowledge(self, prompt: Prompt) -> SimulatedWorker:
        """Note that its worker has computed the prompt, and let it ask for another; return the worker."""
        worker = prompt.worker
        assert worker, "it was taken"
        del self._taken[prompt.key]
        self.depth -= 1
        if prompt.is_directed:
            self._directed[worker.number] -= 1
        worker.book.in_flight -= 1
        self.ask(worker)
        return worker
