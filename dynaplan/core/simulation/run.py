"""One simulation: a trace, a deployment and a policy in, what became of it out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from dynaplan.core.simulation.outcome import Outcome
from dynaplan.core.simulation.service import ServiceSettings, SimulatedService
from dynaplan.domain.decisions import Targets
from dynaplan.domain.trace import TracedRequest


class Policy(Protocol):
    """Decides about the number of workers in virtual time."""

    @property
    def name(self) -> str:
        """What the user calls it."""
        ...

    @property
    def every_s(self) -> float:
        """How often it looks, in seconds."""
        ...

    def begin(self, service: SimulatedService) -> None:
        """The service has started."""
        ...

    def look(self, service: SimulatedService) -> None:
        """A moment to look, and to want another number of workers."""
        ...


@dataclass(frozen=True)
class Moment:
    """The service at one look, for drawings."""

    at_s: float
    workers: Targets
    wanted: Targets
    in_service: int
    prefill_queue: int
    arrived: int


@dataclass(frozen=True)
class Result:
    """What one simulation came to. ``gpu_hours`` counts until the last arrival; ``end_s`` is its very end."""

    policy: str
    outcome: Outcome
    gpu_hours: float
    trace_s: float
    end_s: float
    scale_events: int
    flaps: int
    moments: tuple[Moment, ...]


def simulate(
    trace: Iterable[TracedRequest], settings: ServiceSettings, first: Targets, policy: Policy
) -> Result:
    """Run the whole trace through the service under the policy, and answer what is left at its end."""
    service = SimulatedService(settings, first)
    policy.begin(service)
    history = _History(service)
    look_s, last_s = 0.0, 0.0
    for request in trace:
        while look_s <= request.arrival_s:
            look_s = _look(service, policy, history, look_s)
        service.run_until(request.arrival_s)
        service.arrive(request)
        history.arrived += 1
        last_s = request.arrival_s
    service.advance_decoders(last_s)
    gpu_s = service.pools.gpu_seconds(last_s)
    while service.in_service and look_s < last_s + LONGEST_TAIL_S:
        look_s = _look(service, policy, history, look_s)
    end_s = service.run_out()
    return Result(
        policy.name,
        service.outcome,
        gpu_s / 3600,
        last_s,
        end_s,
        history.scale_events,
        history.flaps,
        tuple(history.moments),
    )


LONGEST_TAIL_S = 3600.0
"""So long after the last arrival the policy still looks; what is not answered then is lost."""

FLAP_S = 300.0
"""A change that takes back one of the same role within that time is a flap."""

MOST_MOMENTS = 2000


def _look(service: SimulatedService, policy: Policy, history: _History, look_s: float) -> float:
    service.run_until(look_s)
    policy.look(service)
    history.note()
    return look_s + policy.every_s


class _History:
    """Scale events, flaps, and moments for drawings: ever fewer of them the longer it gets."""

    def __init__(self, service: SimulatedService) -> None:
        self._service = service
        self._before = service.pools.wanted
        self._last: dict[str, tuple[int, float]] = {}
        self._every = 1
        self._looks = 0
        self.arrived = 0
        self.scale_events = 0
        self.flaps = 0
        self.moments: list[Moment] = []

    def note(self) -> None:
        """The policy has looked."""
        service = self._service
        wanted, at_s = service.pools.wanted, service.now_s
        for role in ("prefill", "decode"):
            change = getattr(wanted, role) - getattr(self._before, role)
            if change:
                self.scale_events += 1
                before, before_s = self._last.get(role, (0, 0.0))
                self.flaps += before * change < 0 and at_s - before_s <= FLAP_S
                self._last[role] = change, at_s
        self._before = wanted
        if self._looks % self._every == 0:
            counts = service.pools.counts()
            workers = Targets(counts.prefill.ready, counts.decode.ready)
            queue = service.queue_depth
            self.moments.append(Moment(at_s, workers, wanted, service.in_service, queue, self.arrived))
            if len(self.moments) > MOST_MOMENTS:
                del self.moments[1::2]
                self._every *= 2
        self._looks += 1


@dataclass(frozen=True)
class StaticPolicy:
    """As many workers as at the start, always."""

    name: str = "static"
    every_s: float = 1.0

    def begin(self, service: SimulatedService) -> None:
        """Nothing to remember."""

    def look(self, service: SimulatedService) -> None:
        """Nothing to change."""
        service.advance_decoders(service.now_s)
