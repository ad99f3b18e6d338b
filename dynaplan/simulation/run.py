"""One simulation: runs a load through a deployment under a policy, and returns the result.

The load is a trace, or clients that each wait for their answer before they ask again. Its course, for
drawings, is thinned out to constant memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.store_keys import SCALED_ROLES
from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.graph.lifecycle import Role
from dynaplan.simulation.outcome import Outcome
from dynaplan.simulation.simulated_service import ServiceSettings, SimulatedService

FLAP_S = 300.0
"""Seconds within which a change that takes back another one of the same role counts as a flap."""

MAX_ITEMS = 2000
"""The largest number of moments, fleet changes or decisions that are kept: more than a page shows."""


@dataclass(frozen=True)
class ServiceSnapshot:
    """The service as the policy saw it, at ``at_s`` seconds; ``arrived`` counts all requests until then."""

    at_s: float
    in_service: int
    prefill_queue: int
    arrived: int


@dataclass(frozen=True)
class FleetChange:
    """The fleet from ``at_s`` on: the workers that get requests, the workers wanted, and the GPUs held."""

    at_s: float
    serving: PoolSizes
    wanted: PoolSizes
    gpus: float


@dataclass(frozen=True)
class ScaleEvent:
    """A decision that changed something, and its reason in the policy's words; "" where it gives none."""

    at_s: float
    before: PoolSizes
    after: PoolSizes
    why: str


class Timed(Protocol):
    """Whatever has a moment in virtual time."""

    @property
    def at_s(self) -> float:
        """The moment, in seconds since the simulation began."""
        ...


T = TypeVar("T", bound=Timed)


class ThinnedSeries(Generic[T]):
    """Keeps the last item of every stretch of time, and doubles the stretches when there are too many
    items."""

    def __init__(self, most: int = MAX_ITEMS) -> None:
        self._most = most
        self._stretch_s = 0.0
        self._items: list[T] = []

    def add(self, item: T) -> None:
        """Add an item, no earlier than the one before."""
        if self._items and self._stretch_of(self._items[-1]) == self._stretch_of(item):
            self._items[-1] = item
            return
        self._items.append(item)
        if len(self._items) > self._most:
            span_s = item.at_s - self._items[0].at_s
            self._stretch_s = max(2 * self._stretch_s, 2 * span_s / self._most)
            self._items = list({self._stretch_of(kept): kept for kept in self._items}.values())

    def items(self) -> tuple[T, ...]:
        return tuple(self._items)

    def _stretch_of(self, item: T) -> float:
        return item.at_s // self._stretch_s if self._stretch_s else item.at_s


class ChangeCount:
    """Counts changes of the numbers of workers, by role, and flaps: changes back within ``FLAP_S``."""

    def __init__(self) -> None:
        self.scale_events = 0
        self.flaps = 0
        self._last: dict[Role, tuple[int, float]] = {}

    def count(self, before: PoolSizes, after: PoolSizes, at_s: float) -> None:
        """Count a change, no earlier than the one counted last."""
        for role in SCALED_ROLES:
            change = after.of(role) - before.of(role)
            if change:
                self.scale_events += 1
                last, last_s = self._last.get(role, (0, 0.0))
                self.flaps += last * change < 0 and at_s - last_s <= FLAP_S
                self._last[role] = change, at_s


class History:
    """Records a service that has just begun; the caller counts ``arrived``."""

    def __init__(self, service: SimulatedService) -> None:
        self._service = service
        self._wanted = service.pools.wanted
        self.arrived = 0
        self.changes = ChangeCount()
        self.moments: ThinnedSeries[ServiceSnapshot] = ThinnedSeries()
        self.fleet: ThinnedSeries[FleetChange] = ThinnedSeries()
        self.events: ThinnedSeries[ScaleEvent] = ThinnedSeries()
        service.pools.on_change = self._fleet_changed
        self._fleet_changed(service.now_s)

    def record(self, why: str) -> None:
        """Record the service after a look of the policy, whose last change had that reason."""
        service = self._service
        at_s, wanted = service.now_s, service.pools.wanted
        if wanted != self._wanted:
            self.events.add(ScaleEvent(at_s, self._wanted, wanted, why))
            self.changes.count(self._wanted, wanted, at_s)
            self._wanted = wanted
        self.moments.add(ServiceSnapshot(at_s, service.in_service, service.queue_depth, self.arrived))

    def _fleet_changed(self, at_s: float) -> None:
        pools = self._service.pools
        serving = PoolSizes(len(pools.serving(Role.PREFILL)), len(pools.serving(Role.DECODE)))
        self.fleet.add(FleetChange(at_s, serving, pools.wanted, pools.held_gpus))


class Policy(Protocol):
    """Decides on the numbers of workers in virtual time.

    A policy may have an attribute ``why``: the reason of its last change.
    """

    @property
    def name(self) -> str:
        """The name that the user gave."""
        ...

    @property
    def interval_s(self) -> float:
        """The seconds of virtual time between two calls of ``evaluate``."""
        ...

    def begin(self, service: SimulatedService) -> None:
        """Start, when the service has started and before the first request."""
        ...

    def evaluate(self, service: SimulatedService) -> None:
        """Read the service's state, and scale it where other numbers of workers are needed."""
        ...


MAX_TAIL_S = 3600.0
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
    moments: tuple[ServiceSnapshot, ...] = ()
    fleet: tuple[FleetChange, ...] = ()
    events: tuple[ScaleEvent, ...] = ()
    note: str = ""


def simulate(
    trace: Iterable[TracedRequest], settings: ServiceSettings, first: PoolSizes, policy: Policy
) -> Result:
    """Run the whole trace through the service under the policy, then answer the requests that are left."""
    course = SimulationRun(settings, first, policy)
    for request in trace:
        course.advance(request.arrival_s)
        course.arrive(request)
    return course.result()


class SimulationRun:
    """One running simulation: the caller lets time pass and requests arrive, then asks for the
    result."""

    def __init__(self, settings: ServiceSettings, first: PoolSizes, policy: Policy) -> None:
        self.service = SimulatedService(settings, first)
        self._policy = policy
        policy.begin(self.service)
        self._history = History(self.service)
        self._evaluation_s = self._last_s = 0.0

    def advance(self, at_s: float) -> None:
        """Let time pass until that moment; the policy looks whenever it is time."""
        while self._evaluation_s <= at_s:
            self._evaluate_policy()
        self.service.run_until(at_s)

    def arrive(self, request: TracedRequest) -> None:
        """Let a request arrive, at the moment to which time has passed."""
        self._last_s = request.arrival_s
        self.service.outcome.windows.of(request.arrival_s).arrive(request)
        self.service.arrive(request)
        self._history.arrived += 1

    def result(self) -> Result:
        """Answer the requests that are left, and return the result; those that nobody can answer are lost."""
        service, policy, history, last_s = self.service, self._policy, self._history, self._last_s
        service.advance_decoders(last_s)
        gpu_s = service.pools.gpu_seconds(last_s)
        while service.in_service and self._evaluation_s < last_s + MAX_TAIL_S:
            self._evaluate_policy()
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

    def _evaluate_policy(self) -> None:
        self.service.run_until(self._evaluation_s)
        self._policy.evaluate(self.service)
        self._history.record(getattr(self._policy, "why", ""))
        self._evaluation_s += self._policy.interval_s


@dataclass(frozen=True)
class StaticPolicy:
    """Keeps the workers of the beginning."""

    name: str = "static"
    interval_s: float = 1.0

    def begin(self, service: SimulatedService) -> None:
        pass

    def evaluate(self, service: SimulatedService) -> None:
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

    def run(self, settings: ServiceSettings, first: PoolSizes, policy: Policy) -> Result:
        """Run the load through the service under the policy, then answer the requests that are left."""
        course = SimulationRun(settings, first, policy)
        service = course.service
        for step in range(max(1, round(self.duration_s / STEP_S))):
            at_s = step * STEP_S
            course.advance(at_s)
            service.advance_decoders(at_s)
            for _ in range(self.clients - service.in_service):
                course.arrive(TracedRequest(at_s, self.prompt_tokens, self.output_tokens))
        return course.result()
