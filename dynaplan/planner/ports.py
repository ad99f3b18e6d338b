"""Ports of the planner: what it measures by, forecasts with, acts through and records to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from dynaplan.contract.counts import Sample
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.util.connection import Closable
from dynaplan.util.errors import TemporaryError

if TYPE_CHECKING:
    from dynaplan.config.settings.planner import Forecast
    from dynaplan.contract.counts import FleetCounts
    from dynaplan.contract.holds import RoleHolds
    from dynaplan.contract.store_keys import DesiredCounts
    from dynaplan.contract.traffic import Traffic
    from dynaplan.planner.deployment import DeployedComponents, ScaledComponent
    from dynaplan.planner.model import Decision, DecisionRecord


class NothingToPlan(TemporaryError):
    """There are no workers to plan for now, because nobody wants any."""


class WorkerLoadSource(Closable, Protocol):
    """The load of workers, read from the workers."""

    async def loads(self, urls: Sequence[str]) -> tuple[WorkerLoad | None, ...]:
        """The load of the worker at each base address, asked at once; None for one that does not answer."""
        ...


class Registrations(Protocol):
    """The workers of a deployment as they are registered."""

    def registered(self) -> FleetCounts:
        """Return the numbers of registered workers; those that start or drain are not known here."""
        ...

    def components(self) -> Sequence[ScaledComponent]:
        """Return the components whose workers are registered, with the models that they serve."""
        ...


class Connector(Protocol):
    """Carries the planner's decisions to ``serve``, or to another system that starts and stops workers.

    Methods raise StoreUnavailable, or ClusterUnavailable, when it cannot be reached now, and NothingToPlan
    where there are no workers because nobody wants any.
    """

    async def fleet(self) -> FleetCounts:
        """Return the present numbers of workers, by role and state."""
        ...

    async def desired(self) -> DesiredCounts:
        """Return the counts asked for now, by any planner or user, and whether they are carried out."""
        ...

    async def holds(self) -> RoleHolds:
        """Return the bounds that persons have set and that are in force now."""
        ...

    async def apply(self, decision: Decision) -> int:
        """Ask for the decision's desired counts; return the decision's id, above every id in use.

        All or nothing. Raises TemporaryError, and asks for nothing, when somebody else changed the desired
        counts since the decision was made, or made a hold that does not allow it.
        """
        ...

    async def components(self) -> DeployedComponents:
        """Return the components that decisions are about, and why they are not ready."""
        ...


class Recorder(Protocol):
    """Writes down the planner's pulls and decisions. Never raises: a failure to write is logged once."""

    def record_sample(self, sample: Sample) -> None:
        """Write down one metric pull."""
        ...

    def record_decision(self, record: DecisionRecord) -> None:
        """Write down the decision of one adjustment interval."""
        ...

    def close(self) -> None:
        """Close the files that were written to."""
        ...


class Forecaster(Closable, Protocol):
    """Forecasts a series of the load, such as requests per interval, from its past."""

    async def forecast(self, history: Sequence[float | None], steps: int) -> Forecast:
        """Forecast the value ``steps`` intervals after the newest value of the history.

        One value per adjustment interval, the newest last; None is "no data", which is not 0. Never raises:
        where a method fails or is late, the last value stands in, and the forecast says so.
        """
        ...

    async def forecast_all(self, requests: Sequence[tuple[Sequence[float | None], int]]) -> list[Forecast]:
        """Forecast each history its number of steps ahead, in their order and under one deadline."""
        ...


class TrafficSource(Closable, Protocol):
    """The requests of clients and the latencies of their answers, over all frontends of a deployment."""

    async def pull(self) -> None:
        """Read the counters, every ``metric-pulling-interval``. Never raises."""
        ...

    async def traffic(self, interval_s: float) -> Traffic:
        """Return the traffic since the last call, which was ``interval_s`` seconds ago.

        Never raises: without data the Traffic has no number of requests and says why; no request is 0.
        """
        ...
