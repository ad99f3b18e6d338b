"""Poison requests: find the request that kills workers, and refuse it.

An engine may crash over one request (a grammar that it cannot read, a field beyond its bounds). When a
worker dies, every request in flight there has failed, the poison and the innocent alike, and all are retried
at other workers: unchecked, one poison request takes a worker after the other with it.

1. **Suspects.** A request that was alone in flight at a death, or in flight at two deaths, is a suspect. It
   is known by the hash of its body.
2. **Isolation.** Suspects are retried one at a time, so that the next death has no more than one.
3. **Refusal.** A death with one suspect in flight was caused by it: the request is answered 500 for
   ``REFUSE_S``. So it has killed two workers where it was alone with them, and three among others.
4. **Streams.** An answer that has begun goes on up to ``migration-limit`` times, whatever is known against
   its request: each of its workers has computed a part of it, and only plain requests migrate. Its deaths
   count against the next request of the same body.
5. **Clearing.** A request that is answered whole is innocent: what was known against it is forgotten.

Each process has its own memory, of bounded size. No hash is computed until a worker has died.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from dynaplan.gateway.openai_api import ApiError, Call
from dynaplan.store.instances import Instance

log = logging.getLogger(__name__)

REFUSE_S = 600.0
"""Seconds without a further death after which evidence is forgotten, and a poison request is tried again."""

DEATHS_OF_A_SUSPECT = 2
"""Deaths among other requests that make a suspect."""

MAX_HASHES = 1000
"""Hashes with evidence that are remembered; those with the oldest deaths are forgotten first."""

MAX_DEAD = 100
"""Dead processes that are remembered: each request that was in flight there reports the death."""

Process = tuple[str, int]
"""A worker's process: its address and its pid. It has several instances when its lease has lapsed."""


@dataclass
class _Evidence:
    """The evidence against one hash."""

    last_s: float = 0.0
    deaths: int = 0
    was_alone: bool = False
    is_refused: bool = False

    @property
    def is_suspect(self) -> bool:
        return self.was_alone or self.deaths >= DEATHS_OF_A_SUSPECT


class Suspect:
    """One attempt at a request, which its worker may die of; ``PoisonRequests.admit`` makes it."""

    __slots__ = ("_isolation", "_poison", "_process", "call")

    def __init__(self, poison: PoisonRequests, call: Call, isolation: asyncio.Lock | None) -> None:
        self._poison = poison
        self._isolation = isolation
        self._process: Process | None = None
        self.call = call

    def sent_to(self, instance: Instance) -> None:
        """Count the request as in flight at that worker until ``close``."""
        self._process = instance.url, instance.pid
        self._poison.in_flight.setdefault(self._process, set()).add(self)

    def begin_answer(self) -> None:
        """Note that the answer has begun; the next suspected request may start."""
        if self._isolation:
            self._isolation.release()
            self._isolation = None

    def worker_died(self) -> None:
        """Record the death of the worker against each request in flight there."""
        if self._process:
            self._poison.record_death(self._process, self)

    def close(self) -> None:
        """End the attempt."""
        if self._isolation:
            self.begin_answer()
        if process := self._process:
            others = self._poison.in_flight[process]
            others.discard(self)
            if not others:
                del self._poison.in_flight[process]
            self._process = None


class PoisonRequests:
    """The attempts in flight in this process, and the evidence of deaths. ``now_s`` is monotonic."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.evidence: OrderedDict[bytes, _Evidence] = OrderedDict()
        self._dead: deque[Process] = deque(maxlen=MAX_DEAD)
        self._isolation = asyncio.Lock()
        self.in_flight: dict[Process, set[Suspect]] = {}

    async def admit(self, call: Call, *, has_begun: bool = False) -> Suspect:
        """Begin an attempt at the client's request; one that is suspected waits for the one before it.

        Raises ApiError (500) for a poison request, unless its answer ``has_begun``. The caller closes it.
        """
        if not (self.evidence and self._is_suspect(call, has_begun)):
            return Suspect(self, call, None)
        await self._isolation.acquire()
        try:
            self._is_suspect(call, has_begun)  # the request before it may have been the same
        except ApiError:
            self._isolation.release()
            raise
        return Suspect(self, call, self._isolation)

    def clear(self, call: Call) -> None:
        """Forget what is known against the request: its whole answer has arrived."""
        if self.evidence:
            self.evidence.pop(_hash(call), None)

    def record_death(self, process: Process, reporter: Suspect) -> None:
        """Record the death of a worker's process, once."""
        if process in self._dead:
            return
        self._dead.append(process)
        self._forget_old()
        hashes = [_hash(each.call) for each in self.in_flight.get(process) or [reporter]]
        known = self.evidence
        suspects = [each for each in hashes if each in known and known[each].is_suspect]
        for each in set(hashes):
            evidence = known.setdefault(each, _Evidence())
            known.move_to_end(each)
            evidence.last_s = self._now_s()
            evidence.deaths += 1
            evidence.was_alone |= len(hashes) == 1
            evidence.is_refused |= suspects == [each]
        while len(known) > MAX_HASHES:
            known.popitem(last=False)

    def _is_suspect(self, call: Call, has_begun: bool) -> bool:
        self._forget_old()
        evidence = self.evidence.get(_hash(call))
        if evidence and evidence.is_refused and not has_begun:
            log.warning("a request is refused: %d workers have died over it", evidence.deaths)
            raise _refusal()
        return evidence is not None and evidence.is_suspect

    def _forget_old(self) -> None:
        while self.evidence:
            oldest = next(iter(self.evidence.values()))
            if self._now_s() - oldest.last_s <= REFUSE_S:
                return
            self.evidence.popitem(last=False)


def _hash(call: Call) -> bytes:
    return hashlib.blake2b(call.body, digest_size=16).digest()


def _refusal() -> ApiError:
    return ApiError(
        500,
        f"Workers have died over this request. It is refused for {REFUSE_S / 60:.0f} minutes: change its"
        " fields. If it is an ordinary request, the workers are broken: `dynaplan status` and"
        " `dynaplan logs` show how they end.",
        kind="server_error",
        code="request_kills_workers",
        metric="internal",
    )
