"""One simulation: runs a load through a deployment under a policy, and returns the result.

The load is a trace, or clients that each wait for their answer before they ask again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from dynaplan.fleet.counts import Targets
from dynaplan.gateway.traced_requests import TracedRequest
from dynaplan.simulation.outcome import Outcome
from dynaplan.simulation.service import ServiceSettings, SimulatedService
from dynaplan.simulation.timeline import FleetChange, History, Moment, ScaleEvent


class Policy(Protocol):
    """Decides on the numbers of workers in virtual time.

    A policy may have an attribute ``why``: the reason of its last change, in words.
    """

    @property
    def name(self) -> str:
        """The name that the user gave."""
        ...

    @property
    def every_s(self) -> float:
        """The seconds of virtual time between two calls of ``look``."""
        ...

    def begin(self, service: SimulatedService) -> None:
        """Take note that the service has started, before the first request."""
        ...

    def look(self, service: SimulatedService) -> None:
        """Look at the service, and ask it for other numbers of workers if need be."""
        ...


LONGEST_TAIL_S = 3600.0
"""Seconds after the last arrival in which the policy still looks, while requests are unanswered. After that,
the workers of that moment answer the rest; a request that they cannot answer is lost."""


@dataclass(frozen=True)
class Result:
    """The result of one simulation.

    ``gpu_hours`` count until the last arrival at ``trace_s`` seconds; ``end_s`` is the end of the last
    answer. ``moments``, ``fleet`` and ``events`` are its course, thinned out when it was long. ``note`` is
    a sentence on the result that no figure says.
    """

    policy: str
    outcome: Outcome
    gpu_hours: float
    trace_s: float
    end_s: float
    scale_events: int
    flaps: int
    moments: tuple[Moment, ...] = ()
    fleet: tuple[FleetChange, ...] = ()
    events: tuple[ScaleEvent, ...] = ()
    note: str = ""


def simulate(
    trace: Iterable[TracedRequest], settings: ServiceSettings, first: Targets, policy: Policy
) -> Result:
    """Run the whole trace through the service under the policy, then answer the requests that are left."""
    course = Course(settings, first, policy)
    for request in trace:
        course.advance(request.arrival_s)
        course.arrive(request)
    return course.result()


class Course:
    """One simulation as it goes on: the caller lets time pass and requests arrive, then asks for the
    result."""

    def __init__(self, settings: ServiceSettings, first: Targets, policy: Policy) -> None:
        self.service = SimulatedService(settings, first)
        self._policy = policy
        policy.begin(self.service)
        self._history = History(self.service)
        self._look_s = self._last_s = 0.0

    def advance(self, at_s: float) -> None:
        """Let time pass until that moment; the policy looks whenever it is time."""
        while self._look_s <= at_s:
            self._look()
        self.service.run_until(at_s)

    def arrive(self, request: TracedRequest) -> None:
        """Let a request arrive, at the moment to which time has passed."""
        self._last_s = request.arrival_s
        self.service.outcome.windows.of(request.arrival_s).arrive(request)
        self.service.arrive(request)
        self._history.arrived += 1

    def result(self) -> Result:
        """Answer the requests that are left, and return the result."""
        service, policy, history, last_s = self.service, self._policy, self._history, self._last_s
        service.advance_decoders(last_s)
        gpu_s = service.pools.gpu_seconds(last_s)
        while service.in_service and self._look_s < last_s + LONGEST_TAIL_S:
            self._look()
        end_s = service.run_out()
        return Result(
            policy.name,
            service.outcome,
            gpu_s / 3600,
            last_s,
            end_s,
            history.changes.scale_events,
            history.changes.flaps,
            history.moments.items(),
            history.fleet.items(),
            history.events.items(),
        )

    def _look(self) -> None:
        self.service.run_until(self._look_s)
        self._policy.look(self.service)
        self._history.note(getattr(self._policy, "why", ""))
        self._look_s += self._policy.every_s


@dataclass(frozen=True)
class StaticPolicy:
    """Keeps the workers of the beginning."""

    name: str = "static"
    every_s: float = 1.0

    def begin(self, service: SimulatedService) -> None:
        """Begin: there is nothing to remember."""

    def look(self, service: SimulatedService) -> None:
        """Bring the engines up to date: there is nothing to change."""
        service.advance_decoders(service.now_s)


STEP_S = 0.01
"""Seconds of virtual time between two looks for ended requests: a client asks again after half of it, which
is nothing beside an answer."""


@dataclass(frozen=True)
class ClosedLoop:
    """``clients`` that ask during ``duration_s``, each the next request as soon as its last one has ended."""

    clients: int
    prompt_tokens: int
    output_tokens: int
    duration_s: float

    def run(self, settings: ServiceSettings, first: Targets, policy: Policy) -> Result:
        """Run the load through the service under the policy, then answer the requests that are left."""
        course = Course(settings, first, policy)
        service = course.service
        for step in range(max(1, round(self.duration_s / STEP_S))):
            at_s = step * STEP_S
            course.advance(at_s)
            service.advance_decoders(at_s)
            for _ in range(self.clients - service.in_service):
                course.arrive(TracedRequest(at_s, self.prompt_tokens, self.output_tokens))
        return course.result()
