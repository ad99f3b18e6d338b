"""The ports: small protocols between the rooms that decide and the adapters that act.

Most ports have a real adapter and a twin in memory; both pass the same contract tests (``tests/contract``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from dynaplan.domain.identity import ProcessIdentity
from dynaplan.domain.routes import Route
from dynaplan.domain.wire.prefill import RemotePrefillRequest
from dynaplan.domain.wire.store import KeyValue, Transaction, WatchEvent
from dynaplan.domain.wire.worker_load import WorkerLoad
from dynaplan.foundation.connection import Closable

if TYPE_CHECKING:
    from pathlib import Path

    from dynaplan.domain.planning.decisions import Decision, DecisionRecord
    from dynaplan.domain.planning.holds import RoleHolds
    from dynaplan.domain.planning.observation import FleetCounts, Sample
    from dynaplan.domain.planning.scaling import DesiredCounts
    from dynaplan.domain.planning.traffic import Traffic
    from dynaplan.domain.settings.forecasting import Forecast


class Clock(Protocol):
    """Monotonic time."""

    def now_s(self) -> float:
        """Return the seconds on a clock that never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return when that many seconds have passed."""
        ...


class Processes(Protocol):
    """The processes of this machine, each told from its successors by its start time."""

    def identify(self, pid: int) -> int | None:
        """Return the process's start, in clock ticks since boot; None without a process, or for a zombie."""
        ...

    def identity_of(self, pid: int) -> ProcessIdentity:
        """Return the identity of a running process; raises ProcessLookupError when it does not run."""
        ...

    def is_alive(self, process: ProcessIdentity) -> bool:
        """Tell whether this very process still runs, and not a later one with its pid."""
        ...

    def kill_group(self, pid: int, started_at: int, waits_s: float = 0.0) -> tuple[int, ...]:
        """SIGKILL the rest of the session that this very process leads or led; return the pids found in it.

        Some processes get time to clean up after the others. The call blocks for them for ``waits_s`` seconds
        at most and then kills them; with 0 it does not block: call it again until no pid is returned.
        """
        ...


class DocumentStore(Protocol):
    """One JSON document, the statefile, replaced as a whole."""

    def read(self) -> dict[str, Any] | None:
        """Return the document, None when there is none; raises StatefileCorrupt."""
        ...

    def write(self, document: dict[str, Any]) -> None:
        """Replace the document; raises StatefileUnwritable."""
        ...

    def remove(self) -> None:
        """Delete the document; nothing happens when there is none."""
        ...

    def set_aside(self) -> Path:
        """Move a document that cannot be read out of the way; return its new path."""
        ...


class Claims(Protocol):
    """One arbiter's claims on GPUs of this machine, by UUID. Methods raise DeploymentError."""

    def claim(self, uuids: Iterable[str]) -> set[str]:
        """Claim these GPUs; return the subset that is now ours."""
        ...

    def release(self, uuids: Iterable[str]) -> None:
        """Give these GPUs back."""
        ...

    def foreign(self, uuids: Iterable[str]) -> dict[str, str]:
        """Return the subset that other living arbiters hold: UUID -> the holder, in words."""
        ...


class StartupTimes(Protocol):
    """The durations of earlier starts, in seconds, by what they depend on. A cache: it never raises."""

    def read(self) -> dict[str, list[float]]:
        """Return the last durations of every key, oldest first."""
        ...

    def learn(self, key: str, seconds: float) -> None:
        """Remember one duration."""
        ...


class KeyValueStore(Protocol):
    """Keys and values, both text. Every method raises StoreUnavailable when the store does not answer."""

    async def get(self, key: str) -> KeyValue | None:
        """Return the key's value and revision, or None when it is absent."""
        ...

    async def list(self, prefix: str) -> tuple[KeyValue, ...]:
        """Return every key under the prefix, in key order."""
        ...

    async def put(self, key: str, value: str, lease: int = 0) -> None:
        """Write the key, under a lease unless 0; raises PermanentError when the lease does not exist."""
        ...

    async def delete(self, key: str) -> None:
        """Remove the key; nothing happens when it is absent."""
        ...

    async def commit(self, transaction: Transaction) -> bool:
        """Carry the transaction out as a whole; False, and nothing written, when its expectation fails."""
        ...

    def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        """Yield a Snapshot, then every change, without a gap, for ever.

        An outage of the store is not an error here: the watch waits, and goes on where it was, or with
        a new Snapshot when the store no longer knows the changes in between. Ends when closed.
        """
        ...


class LeaseKeeper(Protocol):
    """Time-limited rights of keys to exist. Methods raise StoreUnavailable when the store does not answer."""

    async def grant(self, ttl_s: int) -> int:
        """Make a lease that lives ``ttl_s`` seconds unless renewed; return its id, between 0 and 2**63."""
        ...

    async def keep_alive(self, lease: int) -> float:
        """Renew the lease; return its new time to live in seconds, or 0.0 when it no longer exists."""
        ...

    async def revoke(self, lease: int) -> None:
        """End the lease and delete its keys; nothing happens when it no longer exists."""
        ...

    async def identity(self) -> str:
        """Return an identifier of this store's data; it changes when the store comes back empty."""
        ...


class Store(KeyValueStore, LeaseKeeper, Closable, Protocol):
    """A connection to a key-value store that keeps leases."""


class WorkItem(Protocol):
    """One piece of work taken from a queue: delivered again, to any worker, unless acknowledged in time."""

    payload: bytes

    @property
    def deliveries(self) -> int:
        """The number of its deliveries, this one included; starts anew when the queue's server does."""
        ...

    async def ack(self) -> None:
        """Tell the queue that the work is done: it is never delivered again."""
        ...

    async def in_progress(self) -> None:
        """Tell the queue that the work goes on: the time allowed for it starts anew."""
        ...


class WorkQueue(Protocol):
    """A queue that gives each piece of work to one worker.

    Every method raises QueueUnavailable when the queue does not answer.
    """

    async def put(self, payload: bytes) -> int:
        """Append the work; return its sequence number."""
        ...

    async def get(self, timeout_s: float) -> WorkItem | None:
        """Take the next piece of work; None when there is none within ``timeout_s`` seconds."""
        ...

    async def remove(self, sequence: int) -> None:
        """Withdraw work that nobody needs any more; nothing happens when it is gone already."""
        ...

    async def depth(self) -> int:
        """Return the number of pieces of work not done: waiting, or taken and not acknowledged."""
        ...


class Messenger(Closable, Protocol):
    """Fire-and-forget messages. Methods raise QueueUnavailable when the server does not answer."""

    async def publish(self, subject: str, payload: bytes) -> None:
        """Send the payload to the present subscribers of the subject."""
        ...

    async def subscribe(self, subject: str, receive: Callable[[str, bytes], None]) -> None:
        """Call ``receive(subject, payload)`` for every message; a ``>`` at the end matches any rest."""
        ...

    async def queue(self, stream: str) -> WorkQueue:
        """Return the durable work queue of that stream, made when it does not exist."""
        ...


HandOver = Callable[[Mapping[str, Any]], Awaitable[None]]
"""Tells the decode side how to take a prompt's KV entries over: the ``hand_off`` of a PrefillAnswer."""


class RunningEngine(Protocol):
    """An engine's life, and what it says of itself."""

    async def start(self) -> None:
        """Return when the engine can answer; raises WorkerStartFailed when it never will."""
        ...

    async def stop(self) -> None:
        """Let go of everything; return when held hand-offs have been taken or have expired.

        Cancelled, it kills what is left. It may be called before ``start`` has returned, and again.
        """
        ...

    async def died(self) -> None:
        """Raise PermanentError once the engine has failed; until then it does not return."""
        ...

    def card(self) -> Mapping[str, Any]:
        """Describe the engine to frontends: ``model``, ``context_tokens``, ``tokenizer`` and the like."""
        ...

    def load(self) -> WorkerLoad:
        """The load at this moment, or at the engine's last reading, about a second ago."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Samples for the worker's ``/metrics``, by the engine's own names; ``_total`` ends a counter's."""
        ...


class AnsweringEngine(Protocol):
    """The side of an engine that answers requests for tokens: by a server of its own, or the worker's."""

    @property
    def url(self) -> str:
        """The base address of the engine's own server; empty when it answers on the worker's."""
        ...

    def routes(self) -> Sequence[Route]:
        """The routes to serve from the worker's own HTTP server."""
        ...

    async def requests(self) -> int:
        """Count its requests now, running and waiting; raises TemporaryError when it cannot be asked."""
        ...

    async def wake(self) -> str:
        """Wake an engine that sleeps; return the reason why it cannot be woken, or empty."""
        ...


class PrefillingEngine(Protocol):
    """The side of an engine that computes prompts for other workers."""

    @property
    def awaits_release(self) -> bool:
        """True when a hand-off is held until ``release``, False when the engine sees that it was taken."""
        ...

    async def prefill(self, request: RemotePrefillRequest, hand_over: HandOver) -> None:
        """Compute the prompt's KV entries; return when that is done.

        Calls ``hand_over`` once, as soon as a decode worker may begin: where both must work at once, before.
        """
        ...

    def release(self, request_id: str) -> None:
        """Let go of that request's hand-off, which was taken or is not wanted; an unknown one is no error."""
        ...

    def abandon(self) -> None:
        """Let go of every held hand-off: no process is left that could take one."""
        ...


class Engine(RunningEngine, AnsweringEngine, PrefillingEngine, Protocol):
    """One inference engine; every engine has every method, so that a forgotten one is a type error.

    A user of one side names that side's port only.
    """


class MetricsSource(Closable, Protocol):
    """The load of workers, read from the workers."""

    async def loads(self, urls: Sequence[str]) -> tuple[WorkerLoad | None, ...]:
        """The load of the worker at each base address, asked at once; None for one that does not answer."""
        ...


class Connector(Protocol):
    """Carries the planner's decisions to the supervisor, or to another system that starts and stops workers.

    Methods raise StoreUnavailable when it cannot be reached now.
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


class Recorder(Protocol):
    """Writes down the planner's pulls and decisions. Never raises: a failure to write is logged once."""

    def pulled(self, sample: Sample) -> None:
        """Write down one metric pull."""
        ...

    def decided(self, record: DecisionRecord) -> None:
        """Write down the decision of one adjustment interval."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


class GaugeRecorder(Recorder, Protocol):
    """A recorder that keeps the newest numbers, for a page of metrics."""

    def read(self) -> dict[str, float]:
        """Return the newest numbers by their names."""
        ...


class Forecaster(Closable, Protocol):
    """Forecasts a series of the load, such as requests per interval, from its past."""

    async def forecast(
        self, history: Sequence[float | None], steps: int, *, is_count: bool = False
    ) -> Forecast:
        """Forecast the value ``steps`` intervals after the newest value of the history.

        One value per adjustment interval, the newest last; None is "no data", which is not 0. ``is_count``:
        the values are numbers of requests, whose variation by chance is known (Poisson). Never raises: where
        a method fails or is late, the last value stands in, and the forecast says so.
        """
        ...


class TrafficSource(Closable, Protocol):
    """The requests of clients and the latencies of their answers, over all frontends of a deployment."""

    async def pull(self) -> None:
        """Read the counters, every ``metric-pulling-interval``. Never raises."""
        ...

    async def traffic(self, interval_s: float) -> Traffic:
        """Return the traffic since the last call, ``interval_s`` seconds ago.

        Never raises: without data the Traffic has no number of requests and says why; no request is 0.
        """
        ...
