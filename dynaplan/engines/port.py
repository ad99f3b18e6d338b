"""The port that every engine implements: lifecycle, serving, remote prefill and KV events; and its
context."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dynaplan.engines.kv_events import BlockChange
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.events.prefill_requests import RemotePrefillRequest
from dynaplan.http.routes import Route


@dataclass(frozen=True)
class EngineContext:
    """What a worker tells its engine about itself.

    ``role`` is ``decode`` (aggregated workers too) or ``prefill``. ``address`` is the base URL of the
    worker's own HTTP server. ``token`` is the bearer token of the frontends, and the engine's API key.
    ``gpus`` is the worker's ``resources.gpu``: a whole number, or a fraction of one GPU. ``scratch_dir`` is
    a directory in memory, the same for all workers of the deployment; a worker's own files there begin with
    ``{worker_name}.`` and are removed after it has exited. ``publishes_kv_events``: the engine reports which
    KV blocks it stores and removes. ``memory_fraction`` is the share of its GPUs' memory assigned to it,
    where other models use them too; 0 where it has them to itself.
    """

    worker_name: str
    role: str = "decode"
    address: str = ""
    token: str = field(default="", repr=False)
    gpus: float = 0
    scratch_dir: str = ""
    publishes_kv_events: bool = False
    memory_fraction: float = 0.0


class HandOffReady(Protocol):
    """Reports that a decode worker may fetch a prompt's KV entries, by the fields of ``hand_off``."""

    def __call__(self, hand_off: Mapping[str, Any], cached_tokens: int | None = None, /) -> Awaitable[None]:
        """``cached_tokens`` of the prompt were cached and not computed; None if unknown."""
        ...


BlockChangesCallback = Callable[[Sequence[BlockChange]], None]
"""Called after each step of the engine with the KV blocks that it stored and removed, in order."""


class EngineLifecycle(Protocol):
    """The lifecycle, the model card, load and metrics of an engine."""

    async def start(self) -> None:
        """Return when the engine can answer; raises WorkerStartFailed when it never will.

        Raises TemporaryError when another start may help.
        """
        ...

    async def stop(self, *, keeps_cache: bool = False) -> None:
        """Shut down, once every held hand-off has been fetched or has expired.

        ``keeps_cache``: save the KV cache first, if the engine can do that within seconds: this deployment
        may load the model again. If the call is cancelled, remaining processes are killed. It may be called
        before ``start`` has returned, and again.
        """
        ...

    async def wait_for_failure(self) -> None:
        """Raise PermanentError once the engine has failed; until then it does not return."""
        ...

    def card(self) -> Mapping[str, Any]:
        """Describe the engine to frontends: ``model``, ``context_tokens``, ``tokenizer`` and the like."""
        ...

    def load(self) -> WorkerLoad:
        """The load at this moment, or at the engine's last reading, about a second ago."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Samples for the worker's ``/metrics``, under the engine's own names; counters' end in
        ``_total``."""
        ...


class ServingEngine(Protocol):
    """The side of an engine that answers requests for tokens: by a server of its own, or the worker's."""

    @property
    def url(self) -> str:
        """The base address of the engine's own server; empty when it answers on the worker's."""
        ...

    def routes(self) -> Sequence[Route]:
        """The routes to serve from the worker's own HTTP server."""
        ...

    async def count_requests(self) -> int:
        """Count its requests now, running and waiting.

        Raises TemporaryError when it cannot be asked, and PermanentError where it never counts them.
        """
        ...

    async def sleep(self, level: str) -> str:
        """Free most GPU memory until ``wake``; return "", or the reason for a refusal.

        ``level`` is vLLM's: "1" or "2". To be called while it has no requests: engines abort them.
        """
        ...

    async def wake(self) -> str:
        """Wake an engine that sleeps; return "", or the reason why it cannot be woken."""
        ...


class RemotePrefillEngine(Protocol):
    """The side of an engine that computes prompts for other workers."""

    @property
    def waits_for_release(self) -> bool:
        """True if a hand-off is held until ``release``, False if the engine notices that it was fetched."""
        ...

    async def prefill(self, request: RemotePrefillRequest, hand_off_ready: HandOffReady) -> None:
        """Compute the prompt's KV entries; return when that is done.

        Calls ``hand_off_ready`` once, when a decode worker may start: normally after the prefill, but before
        it where the engine's prefill and decode sides have to run at the same time.
        """
        ...

    def release(self, request_id: str) -> None:
        """Free that request's hand-off, which was fetched or is not needed; an unknown one is no error."""
        ...

    def release_all(self) -> None:
        """Release every held hand-off. Called when no decode worker is left that could take one."""
        ...


class KvEventSource(Protocol):
    """The side of an engine that reports which KV blocks it holds."""

    def subscribe_kv_events(self, changed: BlockChangesCallback) -> bool:
        """Call back with every change of the blocks, from the start on; False if the engine has no KV events.

        To be called once, before ``start``.
        """
        ...


class Engine(EngineLifecycle, ServingEngine, RemotePrefillEngine, KvEventSource, Protocol):
    """One inference engine; every engine has every method, so that a forgotten one is a type error.

    Callers depend on the narrowest of the four protocols.
    """
