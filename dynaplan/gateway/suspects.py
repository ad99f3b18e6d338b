"""Which request kills workers: evidence from deaths, and a verdict before the next try.

An engine may crash over one request (a grammar that it cannot read, a field beyond its bounds). When a
worker dies, every request in flight there has failed, the culprit and the innocent alike, and all are tried
elsewhere: so one bad request takes a worker after the other with it. Two facts tell them apart.

1. *Company.* A request that was alone in flight at a death, or was there at two deaths, is **suspected**.
   Suspected requests are tried one at a time, so that the next death has one suspect.
2. *The next death.* If a worker dies with one suspected request in flight, that request is **convicted**:
   it is answered with an error and not tried again. A suspect that is answered whole is cleared.

A request is known by two hashes. The *exact* one is of its whole body. The *shape* is of its field names and
values without text: it finds the same attack with another prompt. Shapes are shared by innocent requests, so
a shape is convicted only by two different bodies, and one good answer clears it. Both memories are bounded
and forget after ten minutes. A hash costs nothing until a worker has died.

A death is the request's and not the worker's, so that no restart is held against the worker, when a request
that was suspected before was there; then the deaths that it was suspected for are too. So are those of
a request that was alone there and has ended without an answer: its client may never try it again.

    clear --alone at a death, or at two deaths--> suspected --the one suspect of a death--> convicted
      ^                                              |
      +---------------- answered whole --------------+
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

FORGET_S = 600.0
"""Seconds without a further death after which evidence is forgotten."""

MOST_REMEMBERED = 1000
"""Hashes that each of the two memories holds; the oldest go first."""

SUSPICIOUS_DEATHS = 2
"""Deaths with company after which a request is suspected."""

MOST_DEATHS_OF_ONE = 8
"""Dead instances that are remembered of one request, the last ones."""

BODIES_THAT_CONVICT = 2
"""Different convicted bodies after which their common shape is convicted."""

TRY_AGAIN_S = 30.0
"""Seconds after the last death in which no convicted request is tried again."""

_DEEPEST = 20
"""Nesting beyond which the shape of a value is not looked at."""


class Suspicion(Enum):
    """The treatment of a request: try it, try it while no other suspect runs, or refuse it."""

    CLEAR = "clear"
    SUSPECTED = "suspected"
    CONVICTED = "convicted"


@dataclass(frozen=True)
class Fingerprint:
    """The two hashes of one request's body."""

    exact: bytes
    shape: bytes


def fingerprint(body: bytes, document: Any) -> Fingerprint:
    """Hash a request: its body as it came, and the ``document`` that it parses to, without texts."""
    return Fingerprint(_hash(body), _hash(repr(_shape(document, _DEEPEST)).encode()))


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _shape(value: Any, depth: int) -> Any:
    """Field names and values; a text is only that it is one, a list the different shapes in it."""
    if isinstance(value, str):
        return "text"
    if not depth or not isinstance(value, dict | list):
        return value if isinstance(value, bool | int | float | None) else "deeper"
    if isinstance(value, list):
        return sorted({repr(_shape(item, depth - 1)) for item in value})
    return sorted((name, repr(_shape(inner, depth - 1))) for name, inner in value.items())


@dataclass
class _Evidence:
    """The evidence against one hash.

    ``dead`` are the instances that died while it was in flight there, ``bodies`` the convicted exact hashes
    of a shape.
    """

    last_s: float
    dead: deque[int] = field(default_factory=lambda: deque(maxlen=MOST_DEATHS_OF_ONE))
    was_alone: bool = False
    bodies: set[bytes] = field(default_factory=set)
    is_convicted: bool = False
    is_innocent: bool = False

    @property
    def verdict(self) -> Suspicion:
        if self.is_convicted:
            return Suspicion.CONVICTED
        if not self.is_innocent and (self.was_alone or len(self.dead) >= SUSPICIOUS_DEATHS):
            return Suspicion.SUSPECTED
        return Suspicion.CLEAR


class _Memory(OrderedDict[bytes, _Evidence]):
    """Evidence by hash, the hash of the youngest death last."""

    def known(self, request: bytes, now_s: float) -> _Evidence | None:
        """Return the evidence against the hash; None when there is none, or it is too old."""
        evidence = self.get(request)
        if evidence and now_s - evidence.last_s > FORGET_S:
            del self[request]
            return None
        return evidence

    def remembered(self, request: bytes, now_s: float) -> _Evidence:
        """Return the evidence against the hash, made when there is none, as the youngest."""
        evidence = self[request] = self.known(request, now_s) or _Evidence(now_s)
        evidence.last_s = now_s
        self.move_to_end(request)
        if len(self) > MOST_REMEMBERED:
            self.popitem(last=False)
        return evidence


class Suspects:
    """The memory of deaths and of the requests that were in flight at them. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._exact = _Memory()
        self._shapes = _Memory()
        self._last_death_s = -math.inf
        self._has_doubts = False

    def are_workers_doubtful(self) -> bool:
        """Tell whether requests were convicted, and no worker has begun an answer since."""
        return self._has_doubts

    def answering(self) -> None:
        """Record that a worker has begun an answer: workers are not broken."""
        self._has_doubts = False

    def is_quiet(self, now_s: float) -> bool:
        """Tell whether no death is remembered: then every verdict is CLEAR, and no hash is needed."""
        return now_s - self._last_death_s > FORGET_S

    def verdict(self, request: Fingerprint, now_s: float) -> Suspicion:
        """Judge a request by its body and, where the body is new, by its shape."""
        exact = self._exact.known(request.exact, now_s)
        shape = self._shapes.known(request.shape, now_s)
        verdicts = {evidence.verdict for evidence in (exact, shape) if evidence}
        if Suspicion.CONVICTED in verdicts and self._has_doubts and now_s - self._last_death_s >= TRY_AGAIN_S:
            return Suspicion.SUSPECTED
        for verdict in (Suspicion.CONVICTED, Suspicion.SUSPECTED):
            if verdict in verdicts:
                return verdict
        return Suspicion.CLEAR

    def died(self, in_flight: Sequence[Fingerprint], now_s: float, instance_id: int = 0) -> frozenset[int]:
        """Record that a worker died while these requests were in flight there.

        Return the instances, this one among them, of whose deaths a request is known now to be the cause.
        """
        self._last_death_s = now_s
        suspected = [request for request in in_flight if self.verdict(request, now_s) is not Suspicion.CLEAR]
        is_alone = len(in_flight) == 1
        for memory, hashes in (
            (self._exact, {request.exact for request in in_flight}),
            (self._shapes, {request.shape for request in in_flight}),
        ):
            for known in hashes:
                evidence = memory.remembered(known, now_s)
                evidence.dead.append(instance_id)
                evidence.was_alone |= is_alone
        if len(suspected) == 1:
            self._convict(suspected[0], now_s)
        charged = (self._exact.known(request.exact, now_s) for request in suspected)
        return frozenset(dead for each in charged if each for dead in each.dead)

    def unanswered(self, request: Fingerprint, now_s: float) -> frozenset[int]:
        """Return the instances that died with this request alone there; it has ended without an answer."""
        evidence = self._exact.known(request.exact, now_s)
        return frozenset(evidence.dead) if evidence and evidence.was_alone else frozenset()

    def answered(self, request: Fingerprint, now_s: float) -> None:
        """Record that the request was answered whole: neither its body nor its shape is the cause.

        What was held against the body is forgotten, so that a request which many clients repeat, such as a
        probe, does not collect the deaths of a day. A shape stays innocent.
        """
        self.answering()
        self._exact.pop(request.exact, None)
        shape = self._shapes.remembered(request.shape, now_s)
        shape.is_innocent, shape.is_convicted = True, False
        shape.bodies.clear()

    def _convict(self, request: Fingerprint, now_s: float) -> None:
        self._has_doubts = True
        self._exact.remembered(request.exact, now_s).is_convicted = True
        shape = self._shapes.remembered(request.shape, now_s)
        shape.bodies.add(request.exact)
        shape.is_convicted = not shape.is_innocent and len(shape.bodies) >= BODIES_THAT_CONVICT
