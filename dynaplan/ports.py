"""The doors: small protocols between what decides and what acts.

Each port has a real adapter and an in-memory twin in ``adapters``; both pass the same contract
tests (``tests/contract``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from dynaplan.domain.identity import ProcessIdentity
from dynaplan.domain.prefill import RemotePrefillRequest
from dynaplan.domain.routes import Route
from dynaplan.domain.store import KeyValue, Transaction, WatchEvent
from dynaplan.domain.worker_load import WorkerLoad

if TYPE_CHECKING:
    from dynaplan.domain.planning.decisions import Decision, DecisionRecord
    from dynaplan.domain.planning.observation import FleetCounts, Sample
    from dynaplan.domain.planning.scaling import DesiredCounts
    from dynaplan.domain.planning.traffic import Traffic
    from dynaplan.domain.settings.forecasting import Forecast


class Clock(Protocol):
    """Monotonic time."""

    def now_s(self) -> float:
        """Seconds on a clock that never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return when that many seconds have passed."""
        ...


class Processes(Protocol):
    """The processes of this machine, each told from its successors by its start time."""

    def identify(self, pid: int) -> int | None:
        """When the process started, in clock ticks since boot; None when there is none or only a zombie."""
        ...

    def identity_of(self, pid: int) -> ProcessIdentity:
        """The identity of a running process; raises ProcessLookupError when it does not run."""
        ...

    def is_alive(self, process: ProcessIdentity) -> bool:
        """Whether this very process still runs."""
        ...

    def kill_group(self, pid: int, started_at: int, waits_s: float = 0.0) -> tuple[int, ...]:
        """SIGKILL what is left of the session that this very process leads or led; who was in it.

        Some may take a while to clean up after the others: blocks for them no longer than ``waits_s``, after
        which they are killed; with 0 call it again until nobody is left.
        """
        ...

    def sweep(self, document: dict[str, Any]) -> list[str]:
        """End what a dead arbiter's deployment left running; one sentence per session ended."""
        ...


class KeyValueStore(Protocol):
    """Keys and values, both text. Every method raises StoreUnavailable when the store does not answer."""

    async def get(self, key: str) -> KeyValue | None:
        """The key, or None when it is absent."""
        ...

    async def list(self, prefix: str) -> tuple[KeyValue, ...]:
        """Every key under the prefix, in key order."""
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
        """First a Snapshot, then every change, without a gap, for ever.

        An outage of the store is not an error here: the watch waits, and goes on where it was, or with
        a new Snapshot when the store no longer knows the changes in between. Ends when closed.
        """
        ...


class LeaseKeeper(Protocol):
    """Time-limited rights of keys to exist. Methods raise StoreUnavailable when the store does not answer."""

    async def grant(self, ttl_s: int) -> int:
        """A new lease; its id, positive and below 2**63."""
        ...

    async def keep_alive(self, lease: int) -> float:
        """Renew the lease; its new time to live in seconds, or 0.0 when it no longer exists."""
        ...

    async def revoke(self, lease: int) -> None:
        """End the lease and delete its keys; nothing happens when it no longer exists."""
        ...

    async def identity(self) -> str:
        """What identifies this store's data; it changes when the store comes back empty."""
        ...


class WorkItem(Protocol):
    """One piece of work taken from a queue: delivered again to somebody unless acknowledged in time."""

    payload: bytes

    @property
    def deliveries(self) -> int:
        """How often it has been delivered, this time included; starts anew when the queue's server does."""
        ...

    async def ack(self) -> None:
        """The work is done: never deliver it again."""
        ...

    async def nack(self, delay_s: float = 0.0) -> None:
        """The work was not done: deliver it again after the delay."""
        ...

    async def in_progress(self) -> None:
        """The work goes on: start the time allowed for it anew."""
        ...


class WorkQueue(Protocol):
    """Work for whoever comes first. Every method raises QueueUnavailable when the queue does not answer."""

    async def put(self, payload: bytes) -> int:
        """Append the work; its sequence number."""
        ...

    async def get(self, timeout_s: float) -> WorkItem | None:
        """The next piece of work, or None when there is none in that time."""
        ...

    async def remove(self, sequence: int) -> None:
        """Withdraw work that nobody needs any more; nothing happens when it is gone already."""
        ...

    async def depth(self) -> int:
        """How much work is not done: waiting, or taken and not acknowledged."""
        ...


class Messenger(Protocol):
    """Fire-and-forget messages. Methods raise QueueUnavailable when the server does not answer."""

    async def publish(self, subject: str, payload: bytes) -> None:
        """Send the payload to whoever listens now."""
        ...

    async def subscribe(self, subject: str, receive: Callable[[str, bytes], None]) -> None:
        """Call ``receive(subject, payload)`` for every message; a ``>`` at the end matches any rest."""
        ...

    async def queue(self, stream: str) -> WorkQueue:
        """The durable work queue of that stream, made when it does not exist."""
        ...

    async def close(self) -> None:
        """End every subscription and the connection."""
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

        Cancelled, it waits for nothing more and kills what is left. It may be called before ``start`` has
        returned, and again.
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


class PrefillingEngine(Protocol):
    """The side of an engine that computes prompts for other workers."""

    @property
    def awaits_release(self) -> bool:
        """True when a hand-off is held until ``release``, False when the engine sees that it was taken."""
        ...

    async def prefill(self, request: RemotePrefillRequest, hand_over: HandOver) -> None:
        """Compute the prompt's KV entries; return when that is done.

        Calls ``hand_over`` once, as soon as a decode worker may begin: after the computation, or before it
        where both engines must work at the same time.
        """
        ...

    def release(self, request_id: str) -> None:
        """Let go of that request's hand-off, which was taken or is not wanted; an unknown one is no error."""
        ...

    def abandon(self) -> None:
        """Let go of every held hand-off: no process is left that could take one."""
        ...


class Engine(RunningEngine, AnsweringEngine, PrefillingEngine, Protocol):
    """One inference engine, in the worker's process or as its child.

    Every engine has every method, so that a misspelt or a forgotten one is a type error where the engine is
    made. A user of one side names that side's port only.
    """


class MetricsSource(Protocol):
    """The load of workers, as they tell it themselves."""

    async def loads(self, urls: Sequence[str]) -> tuple[WorkerLoad | None, ...]:
        """The load of the worker at each base address, asked at once; None for one that does not answer."""
        ...

    async def close(self) -> None:
        """End the connections."""
        ...


class Connector(Protocol):
    """Carries the planner's decisions to whoever starts and stops workers.

    Methods raise StoreUnavailable when that is not reachable now.
    """

    async def fleet(self) -> FleetCounts:
        """The workers there are, by role and state."""
        ...

    async def desired(self) -> DesiredCounts:
        """What is asked for now, whoever asked for it, and whether it is being carried out."""
        ...

    async def apply(self, decision: Decision) -> int:
        """Ask for the decision's desired counts; the id it travels under, above every id in use.

        All or nothing. Raises TemporaryError, and asks for nothing, when somebody else changed the desired
        counts since the decision was made.
        """
        ...


class Recorder(Protocol):
    """Writes down what the planner sees and decides. Never raises: what cannot be written is logged once."""

    def pulled(self, sample: Sample) -> None:
        """One metric pull."""
        ...

    def decided(self, record: DecisionRecord) -> None:
        """One adjustment interval."""
        ...

    def close(self) -> None:
        """Let go of the files."""
        ...


class Forecaster(Protocol):
    """Foretells a curve of the load from its past."""

    async def forecast(
        self, history: Sequence[float | None], steps: int, *, is_count: bool = False
    ) -> Forecast:
        """What is expected ``steps`` intervals after the newest value of the history.

        One value per adjustment interval, the newest last; None is "no data", which is not 0. ``is_count``:
        the values are numbers of requests, of which it is known how much they vary by chance. Never raises:
        where a method fails or is late, the last value stands in, and the forecast says so.
        """
        ...

    async def close(self) -> None:
        """Let go of everything."""
        ...


class TrafficSource(Protocol):
    """What clients sent and how they were answered, over all frontends of a deployment."""

    async def pull(self) -> None:
        """Look at the counters, every ``metric-pulling-interval``. Never raises."""
        ...

    async def traffic(self, interval_s: float) -> Traffic:
        """What was seen since the last call, which was that long ago.

        Never raises: no data is a Traffic without requests that says why; no requests are 0.
        """
        ...

    async def close(self) -> None:
        """End the connections."""
        ...
