"""One simulation: a trace, a deployment and a policy in, what became of it out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from dynaplan.domain.planning.targets import Targets
from dynaplan.domain.trace import TracedRequest
from dynaplan.simulator.outcome import Outcome
from dynaplan.simulator.service import ServiceSettings, SimulatedService
from dynaplan.simulator.timeline import FleetChange, History, Moment, ScaleEvent


class Policy(Protocol):
    """Decides about the number of workers in virtual time.

    One that has a ``why`` says there why it last wanted another number.
    """

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
class Verdict:
    """What the oracle knows of its own result.

    ``is_slo_met``: at least ``percentile`` per cent of the requests meet the TTFT target, and as many the ITL
    target. ``lower_bound_gpu_hours``: no schedule that meets the SLO takes less; None where it is unknown,
    for the reason in ``no_lower_bound``.
    """

    percentile: float
    is_slo_met: bool
    lower_bound_gpu_hours: float | None
    no_lower_bound: str = ""


@dataclass(frozen=True)
class Result:
    """What one simulation came to. ``gpu_hours`` counts until the last arrival; ``end_s`` is its very end.

    ``moments``, ``fleet`` and ``events`` tell how it went, thinned out when it was long.
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
    verdict: Verdict | None = None


def simulate(
    trace: Iterable[TracedRequest], settings: ServiceSettings, first: Targets, policy: Policy
) -> Result:
    """Run the whole trace through the service under the policy, and answer what is left at its end."""
    service = SimulatedService(settings, first)
    policy.begin(service)
    history = History(service)
    look_s, last_s = 0.0, 0.0
    for request in trace:
        while look_s <= request.arrival_s:
            look_s = _look(service, policy, history, look_s)
        service.run_until(request.arrival_s)
        service.outcome.windows.of(last_s := request.arrival_s).arrive(request)
        service.arrive(request)
        history.arrived += 1
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
        history.moments.items(),
        history.fleet.items(),
        history.events.items(),
    )


LONGEST_TAIL_S = 3600.0
"""So long after the last arrival the policy still looks; what is not answered then is lost."""


def _look(service: SimulatedService, policy: Policy, history: History, look_s: float) -> float:
    service.run_until(look_s)
    policy.look(service)
    history.note(getattr(policy, "why", ""))
    return look_s + policy.every_s


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
