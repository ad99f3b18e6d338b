"""Attempts in flight at each worker, so that a death is laid at the door of the request that causes it.

The evidence and the verdicts are ``core.routing.suspects``; this is its memory in a running frontend.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from dynaplan.gateway.openai_api import ApiError, Call
from dynaplan.gateway.suspects import TRY_AGAIN_S, Fingerprint, Suspects, Suspicion, fingerprint
from dynaplan.store.instances import Instance

log = logging.getLogger(__name__)

MOST_DEAD_INSTANCES = 1000
"""Dead instances that are remembered: the failures of one death are reported by every request there."""

Process = tuple[str, int]
"""A worker's process: its address and its pid. It is several instances when the store has lost its lease."""


class Trial:
    """One attempt to have a request answered by one worker."""

    def __init__(self, trials: Trials, call: Call) -> None:
        self._trials = trials
        self.call = call
        self.instance: Instance | None = None
        self.turn: asyncio.Lock | None = None
        self.patience: asyncio.Timeout | None = None

    def at(self, instance: Instance) -> None:
        """Record that the request is in flight at that worker from now on."""
        self.instance = instance
        self._trials.in_flight.setdefault(_process_of(instance), {})[self] = instance.instance_id

    def answering(self, *, is_good: bool = True) -> None:
        """Record that the answer, a good one or an error, has begun: the next suspect may be tried."""
        if is_good:
            self._trials.answering()
        self._end_turn()

    def give_up(self) -> None:
        """End the wait for the beginning of the answer, if it is still waited for."""
        patience, self.patience = self.patience, None
        if patience:
            patience.reschedule(0.0)

    def answered(self) -> None:
        """Record that the whole answer came: this request is not what kills workers."""
        self._trials.answered(self)

    def died(self) -> None:
        """Record that the connection to the worker broke off, as it does when the worker dies."""
        self._trials.died(self)

    def end(self) -> None:
        """Forget that the request is in flight."""
        self._end_turn()
        if self.instance:
            process = _process_of(self.instance)
            others = self._trials.in_flight.get(process, {})
            others.pop(self, None)
            if not others:
                self._trials.in_flight.pop(process, None)

    def _end_turn(self) -> None:
        if self.turn:
            self.turn.release()
            self.turn = None


class Trials:
    """Every attempt in flight; suspected requests take turns, convicted ones are refused.

    ``forgive`` is told the dead instances of whose deaths requests are the cause, and not the workers.
    """

    def __init__(
        self, now_s: Callable[[], float], forgive: Callable[[frozenset[int]], None] = lambda dead: None
    ) -> None:
        self._now_s = now_s
        self._forgive = forgive
        self._suspects = Suspects()
        self._turn = asyncio.Lock()
        self._dead: OrderedDict[int, None] = OrderedDict()
        self.in_flight: dict[Process, dict[Trial, int]] = {}

    @asynccontextmanager
    async def trial(self, call: Call) -> AsyncIterator[Trial]:
        """Begin an attempt, when it is its turn; raises ApiError (500) for what has killed workers."""
        trial = Trial(self, call)
        try:
            if self._verdict(call) is Suspicion.SUSPECTED:
                await self._turn.acquire()
                trial.turn = self._turn
                self._verdict(call)  # the suspect before it may have been this very attack
            yield trial
        finally:
            trial.end()

    def fell_asleep(self, instance_ids: Iterable[int]) -> None:
        """Have each attempt given up that waits for an answer of these sleeping instances."""
        asleep = frozenset(instance_ids)
        for there in self.in_flight.values():
            for trial, instance_id in there.items():
                if instance_id in asleep:
                    trial.give_up()

    def answering(self) -> None:
        """Take the beginning of an answer as evidence that workers are not broken."""
        self._suspects.answering()

    def answered(self, trial: Trial) -> None:
        """Take a whole answer as evidence for its request."""
        if not self._suspects.is_quiet(self._now_s()):
            self._suspects.answered(_fingerprint(trial.call), self._now_s())

    def died(self, trial: Trial) -> None:
        """Take the death of the trial's worker as evidence against all that was in flight there, once."""
        if trial.instance is None or trial.instance.instance_id in self._dead:
            return
        there = self.in_flight.get(_process_of(trial.instance), {trial: trial.instance.instance_id})
        self._dead.update(dict.fromkeys(there.values()))
        while len(self._dead) > MOST_DEAD_INSTANCES:
            self._dead.popitem(last=False)
        last_id = list(there.values())[-1]
        self._forgive(
            self._suspects.died([_fingerprint(each.call) for each in there], self._now_s(), last_id)
        )

    def unanswered(self, call: Call) -> None:
        """Take the end of a request without an answer, as when its client has left, as the last of it."""
        if not self._suspects.is_quiet(self._now_s()):
            self._forgive(self._suspects.unanswered(_fingerprint(call), self._now_s()))

    def _verdict(self, call: Call) -> Suspicion:
        if self._suspects.is_quiet(self._now_s()):
            return Suspicion.CLEAR
        verdict = self._suspects.verdict(_fingerprint(call), self._now_s())
        if verdict is Suspicion.CONVICTED:
            log.warning("a request is refused: workers have died over it, or over others of its shape")
            raise _refusal(are_workers_doubtful=self._suspects.are_workers_doubtful())
        return verdict


def _process_of(instance: Instance) -> Process:
    return instance.url, instance.pid


def _fingerprint(call: Call) -> Fingerprint:
    return fingerprint(call.body, call.document)


def _refusal(*, are_workers_doubtful: bool) -> ApiError:
    """Make the error 500 of a convicted request; where its workers may be broken it says so."""
    if are_workers_doubtful:
        message = (
            "Workers have died over this request, or over others with the same fields and values, and none"
            f" has begun an answer since. One is tried every {TRY_AGAIN_S:.0f} s. If it is an ordinary"
            " request, the workers are broken: `dynaplan status` and `dynaplan logs` show how they end."
            " Otherwise change its fields."
        )
    else:
        message = (
            "Workers have died over this request, or over requests with the same fields and values. It is"
            " not tried again for some minutes. Change its fields."
        )
    return ApiError(
        500,
        message,
        kind="server_error",
        code="request_kills_workers",
        metric="internal",
        headers={"Retry-After": str(round(TRY_AGAIN_S))} if are_workers_doubtful else {},
    )
