"""A fleet that exists in the model only, and what would have become of the requests that really came.

**Workers.** Each worker that is asked for serves ``startup_s`` later; one that is taken back while it starts
never serves, and one that serves leaves at once. Unmanaged workers serve beside them.

**Late requests** of an interval, for each target on its own, are the larger of two parts:

- a fluid's (``core/sizing/fluid.py``): the arrivals by metric pull go through the workers that served in
  that pull, queues being carried on from interval to interval. It sees bursts, backlogs and start-ups,
- the steady state's (``queueing_model.py``) at the mean rate, with Poisson arrivals and the workers of the
  interval's middle: the waits by chance that a fluid does not have. Where these are overloaded it says
  nothing.

They are not added: both count a wait where load is near capacity. A request misses the first target
independently of the second: late = 1 - (1 - late TTFT) (1 - long ITL).

**Mean TTFT** is the steady state's (of a lone request where it is overloaded) and the mean wait of the
fluid; the mean ITL is the steady state's, or that of full workers.

**Constants.** None of its own.

**Where it is wrong.** Draining workers neither serve nor cost anything; lengths are those of the interval,
for requests that waited since an earlier one too; without arrivals by pull (Prometheus as the source) the
interval counts as one even stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dynaplan.core.planning.unmanaged import together
from dynaplan.core.sizing.fluid import Work, decoded, queued, waiting
from dynaplan.core.sizing.measured_load import measured_demand
from dynaplan.core.sizing.queueing.queueing_model import ServiceModel, SteadyState
from dynaplan.domain.lifecycle import Role
from dynaplan.domain.planning.scaling import SCALED_ROLES
from dynaplan.domain.planning.sizing import Decoding, SlaTargets
from dynaplan.domain.planning.targets import Targets
from dynaplan.domain.planning.traffic import Traffic


@dataclass(frozen=True)
class StartingWorker:
    """A worker that was asked for and serves from ``ready_s`` on (monotonic seconds)."""

    role: Role
    ready_s: float


@dataclass(frozen=True)
class ImaginedFleet:
    """Numbers of workers that were asked for, those of them that still start, and the requests they hold.

    ``prompts`` wait or are computed, ``answers`` are being decoded. ``alone`` are unmanaged workers.
    """

    asked: Targets
    starting: tuple[StartingWorker, ...] = ()
    prompts: float = 0.0
    answers: Decoding = field(default_factory=Decoding)
    alone: Targets = field(default_factory=Targets)

    def managed(self, at_s: float) -> Targets:
        """Return the numbers of managed workers that serve at a time."""
        late = [each.role for each in self.starting if each.ready_s > at_s]
        return Targets(
            self.asked.prefill - late.count(Role.PREFILL), self.asked.decode - late.count(Role.DECODE)
        )

    def serving(self, at_s: float) -> Targets:
        """Return the numbers of workers that serve at a time, unmanaged ones included."""
        return together(self.managed(at_s), self.alone)

    def asking(self, desired: Targets, at_s: float, startup_s: float) -> ImaginedFleet:
        """Return the fleet after a decision; of workers that are too many the starting ones leave first."""
        starting = [each for each in self.starting if each.ready_s > at_s]
        for role in SCALED_ROLES:
            more = desired.of(role) - self.asked.of(role)
            starting += [StartingWorker(role, at_s + startup_s)] * more
            newest = [each for each in reversed(starting) if each.role is role]
            for each in newest[: max(0, -more)]:
                starting.remove(each)
        return replace(self, asked=desired, starting=tuple(starting))


@dataclass(frozen=True)
class Fares:
    """The outcome of an interval's requests: the part that was late (0 to 1), mean TTFT and ITL in ms."""

    late: float
    ttft_ms: float
    itl_ms: float


def fared(
    fleet: ImaginedFleet, traffic: Traffic, until_s: float, service: ServiceModel, targets: SlaTargets
) -> tuple[ImaginedFleet, Fares | None]:
    """Return the fleet after an interval that ended at ``until_s``, and what its requests got.

    None without requests, which leaves no queue, and where requests or lengths are not known, which leaves
    the queues as they are.
    """
    demand = measured_demand(traffic)
    if demand is None:
        return (replace(fleet, prompts=0.0, answers=Decoding()) if traffic.requests == 0 else fleet), None
    steady = SteadyState(service, replace(demand, burstiness=1.0))
    flow = _Flow(fleet, Work(steady, targets))
    arrivals = traffic.arrivals or (demand.requests_per_s * traffic.interval_s,)
    pull_s = traffic.interval_s / len(arrivals)
    for number, arrived in enumerate(arrivals):
        flow.pull(arrived, pull_s, fleet.serving(until_s - traffic.interval_s + number * pull_s))
    return flow.fleet, flow.fares(fleet.serving(until_s - traffic.interval_s / 2))


class _Flow:
    """One interval's arrivals on their way through the workers."""

    def __init__(self, fleet: ImaginedFleet, work: Work) -> None:
        self.fleet = fleet
        self._work = work
        self._prompts_per_s, self._room_s = work.prompts_per_s, work.room_s
        self._requests = self._judged = self._late = self._long = self._waited_s = 0.0

    def pull(self, arrived: float, pull_s: float, serving: Targets) -> None:
        """Let the arrivals of one pull come."""
        fleet, is_aggregated = self.fleet, self._work.state.is_aggregated
        computing = serving.decode if is_aggregated else serving.prefill
        per_s = computing * self._prompts_per_s
        prompts, late, waited_s = fleet.prompts + arrived, 1.0, pull_s
        if computing:
            prompts, late = queued(fleet.prompts, arrived, pull_s, per_s, self._room_s)
            waited_s = (fleet.prompts + prompts) / 2 / per_s
        out = fleet.prompts + arrived - prompts
        if serving.decode:
            answers, long = decoded(fleet.answers, out, pull_s, serving.decode, self._work)
        else:
            answers, long = waiting(fleet.answers, out), out
        self.fleet = replace(fleet, prompts=prompts, answers=answers)
        self._requests += arrived
        self._judged += fleet.answers.unjudged + out - answers.unjudged
        self._late, self._long = self._late + late * arrived, self._long + long
        self._waited_s += waited_s * arrived

    def fares(self, serving: Targets) -> Fares:
        """Return what the requests got, with ``serving`` for the steady state."""
        state, targets, requests = self._work.state, self._work.targets, max(self._requests, 1e-9)
        late, wait_ms = self._late / requests, 1000 * self._waited_s / requests
        long = min(1.0, self._long / max(self._judged, 1e-9))
        is_served = bool(serving.decode and (state.is_aggregated or serving.prefill))
        means = state.mean_times(serving) if is_served else None
        if means:
            late = max(late, state.chance_of_ttft_over(targets.ttft_ms, serving))
            long = max(long, state.decode_batch(serving.decode).chance_of_itl_over(targets.itl_ms))
        full_ms = self._work.step_ms(self._work.most_at_once)
        known = means or state.idle().mean_times(Targets(1, 1))
        ttft_ms = known.mean_ttft_ms if known else full_ms
        return Fares(1 - (1 - late) * (1 - long), ttft_ms + wait_ms, means.mean_itl_ms if means else full_ms)
