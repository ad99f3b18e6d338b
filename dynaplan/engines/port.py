"""Ports to an engine: what runs it, what it answers, what it prefills for others, and its surroundings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dynaplan.engines.kv_events import Change
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.events.prefill_requests import RemotePrefillRequest
from dynaplan.util.http_routes import Route


@dataclass(frozen=True)
class EngineContext:
    """The surroundings of one worker's engine.

    ``role`` is ``decode`` (aggregated workers too) or ``prefill``. ``address`` is the base URL of the
    worker's own HTTP server. ``token`` is the bearer token of the frontends, and the engine's API key.
    ``gpus`` is the worker's ``resources.gpu``: a whole number, or a fraction of one GPU. ``scratch_dir`` is
    a directory in memory, the same for all workers of the deployment; a worker's own files there begin with
    ``{worker_name}.`` and are removed when it is gone. ``publishes_blocks``: the engine is to tell the worker
    which KV blocks it stores and removes. ``memory_fraction`` is the part of its GPUs' memory that it was
    given, where it shares them with other models; 0 where it does not.
    """

    worker_name: str
    role: str = "decode"
    address: str = ""
    token: str = field(default="", repr=False)
    gpus: float = 0
    scratch_dir: str = ""
    publishes_blocks: bool = False
    memory_fraction: float = 0.0


class HandOver(Protocol):
    """Tells the decode side how to take a prompt's KV entries over: the ``hand_off`` of a PrefillAnswer."""

    def __call__(self, hand_off: Mapping[str, Any], cached_tokens: int | None = None, /) -> Awaitable[None]:
        """Hand over; ``cached_tokens`` of the prompt were cached and not computed, None where not known."""
        ...


BlocksChanged = Callable[[Sequence[Change]], None]
"""Hears of the KV blocks that a step of an engine has stored and removed, in order."""


class RunningEngine(Protocol):
    """An engine's life, and what it says of itself."""

    async def start(self) -> None:
        """Return when the engine can answer; raises WorkerStartFailed when it never will."""
        ...

    async def stop(self, *, keeps_cache: bool = False) -> None:
        """Let go of everything; return when held hand-offs have been taken or have expired.

        ``keeps_cache``: the model may be loaded again by this deployment; what makes its next start more
        useful is saved first, if the engine can do that within seconds.
        Cancelled, it kills what is left. It may be called before ``start`` has returned, and again.
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

    async def count_requests(self) -> int:
        """Count its requests now, running and waiting.

        Raises TemporaryError when it cannot be asked, and PermanentError where it never counts them.
        """
        ...

    async def sleep(self, level: str) -> str:
        """Give most of its memory back until ``wake``; return the reason why it does not, or empty.

        To be called while it has no requests: engines abort them.
        """
        ...

    async def wake(self) -> str:
        """Wake an engine that sleeps; return the reason why it cannot be woken, or empty."""
        ...


class PrefillingEngine(Protocol):
    """The side of an engine that computes prompts for other workers."""

    @property
    def waits_for_release(self) -> bool:
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

    def release_all(self) -> None:
        """Release every held hand-off. Called when no decode worker is left that could take one."""
        ...


class CachingEngine(Protocol):
    """The side of an engine that reports which KV blocks it holds."""

    def subscribe_blocks(self, changed: BlocksChanged) -> bool:
        """Call back with every change of the blocks, from the start on; False when the engine does not tell.

        To be called once, before ``start``.
        """
        ...


class Engine(RunningEngine, AnsweringEngine, PrefillingEngine, CachingEngine, Protocol):
    """One inference engine; every engine has every method, so that a forgotten one is a type error.

    A user of one side names that side's port only.
    """
