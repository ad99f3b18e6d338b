"""The differences between engines that run as a server of their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynaplan.config.command_words import COMMAND, PORT, read_command
from dynaplan.config.parallelism import DATA, parallel_size
from dynaplan.engines.kind import EngineKind
from dynaplan.engines.port import Engine, EngineContext, HandOffReady
from dynaplan.engines.server.engine_options import Options
from dynaplan.engines.server.metrics import MetricNames
from dynaplan.engines.server.sleep import SleepPaths
from dynaplan.events.prefill_requests import RemotePrefillRequest
from dynaplan.util.errors import PermanentError, TemporaryError

EXIT_USAGE = 2
"""The exit code for a wrong command line, of argparse and click alike; another start cannot help."""


STOP_COMMAND = "stop-command"

PID = "${PID}"
"""What stands in a ``stop-command`` for the pid of the program."""


@dataclass(frozen=True)
class LaunchLine:
    """The command line that starts an engine's server.

    ``environment`` comes on top of the worker's own. ``files`` (path and text) are written with mode 0600
    before the start and removed after the end: for secrets that an engine cannot take from its environment.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)


Ask = Callable[[str, Mapping[str, Any], str], Awaitable[Mapping[str, Any]]]
"""``ask(path, body, request_id)`` posts to the worker's own engine and returns its JSON answer.

Raises PermanentError when the engine refuses the request (4xx), TemporaryError when it fails.
"""


class ServerKind(EngineKind):
    """One engine that runs as a server of its own: all that differs between such engines."""

    metric_names: MetricNames

    ready_path = "/health"
    """Answers 200 when requests are taken."""

    takes_any_status = False
    """It is ready when it answers at all."""

    metrics_path = "/metrics"
    metrics_timeout_s = 3.0

    parts: tuple[str, ...] = ()
    """Texts in the command lines of processes without which the engine is dead, though its server may go on
    for a while."""

    term_grace_s = 15.0
    """Seconds that an idle engine may take to end after SIGTERM."""

    stalls_on_term = False
    """After SIGTERM with requests running, their clients would hang; it is killed instead."""

    address_in_use: tuple[str, ...] = ("address already in use", "Errno 98", "EADDRINUSE")
    """Texts by which it says that a port was taken."""

    measures_memory = True
    """It measures the free memory when it starts (the machine's, where it has no GPU), unless it is told how
    much to take (``given_memory_bytes``); no two that measure may start at once."""

    reports_requests = True
    """Its count of running and waiting requests can be relied upon when it drains."""

    accepts_any_model = False
    """It answers whatever model a request names, and its own name cannot be chosen, so that
    ``served-model-name`` is known to dynaplan only."""

    sleep_paths: SleepPaths | None = None
    """How it sleeps, for an engine that can."""

    prefills = False
    """It can compute prompts for other workers (``prefill``)."""

    publishes_kv_events = False
    """It publishes which KV blocks it stores and removes, on ZMQ sockets."""

    holds_hand_offs = True
    """It keeps the KV entries of a prefill until the decode side has read them."""

    def stop_command(self, options: Options, port: int, pid: int) -> Sequence[str]:
        """Return the command that ends the engine with that pid; empty where SIGTERM does."""
        words = read_command(options.get(STOP_COMMAND), STOP_COMMAND).words
        return [word.replace(PORT, str(port)).replace(PID, str(pid)) for word in words]

    @property
    def can_sleep(self) -> bool:
        return self.sleep_paths is not None

    def make(self, options: Options, context: EngineContext) -> Engine:
        # A server's client, child and sockets take 0.1 s to import, which no check and no frontend needs.
        from dynaplan.engines.server.engine import ServerEngine

        return ServerEngine(self, options, context)

    @abstractmethod
    def command(self, options: Options, context: EngineContext, ports: Sequence[int]) -> LaunchLine:
        """Build the command line; ``ports`` are consecutive, the HTTP port first."""

    def ports_needed(self, options: Options, context: EngineContext) -> int:
        return 1

    def own_url(self, options: Options) -> str:
        """Return the engine's address, if the user has configured one; empty where it gets a leased port."""
        return ""

    def given_memory_bytes(self, environ: Mapping[str, str]) -> float:
        """Return the memory in bytes, without weights, that it is told to take where it has no GPU, or 0."""
        return 0.0

    def request_slots(self, options: Options) -> int:
        """Return the most requests that are computed at once; 0 when it is not known."""
        slots = options.get("max-num-seqs")
        return slots if isinstance(slots, int) else 0

    def no_kv_events_reason(self, options: Options) -> str:
        """Return the reason why it cannot report which KV blocks it holds; empty where it can."""
        if not self.publishes_kv_events:
            return "it has no way to"
        if options.get(COMMAND):
            return "its command is its owner's"
        if options.get("kv-events-config") is not None:
            return "kv-events-config is set, so its events are the user's"
        if parallel_size(options, DATA) > 1:
            return "its data parallel ranks have a cache each, and a router sees one worker"
        return self.no_prefix_cache_reason(options)

    def no_prefix_cache_reason(self, options: Options) -> str:
        """Return the option that turns its prefix cache off; empty where it is on."""
        return "enable-prefix-caching is false" if options.get("enable-prefix-caching") is False else ""

    def requires_remote_prefill(self, options: Options, context: EngineContext) -> bool:
        """Return True if an engine with these options accepts only prompts prefilled by another worker."""
        return False

    async def prefill(
        self, request: RemotePrefillRequest, hand_off_ready: HandOffReady, ask: Ask, ports: Sequence[int]
    ) -> None:
        """Prefill a prompt for another worker; ``ports`` are the leased ports, the HTTP port first."""
        raise PermanentError(f"{self.name} does not prefill for others")


def prefill_body(request: RemotePrefillRequest, **fields: Any) -> dict[str, Any]:
    """Reduce the client's request to its prompt: one token, not streamed; add the engine's own fields."""
    dropped = ("stream_options", "min_tokens", "best_of")
    body = {key: value for key, value in request.body.items() if key not in dropped}
    body |= {"stream": False, "max_tokens": 1, "n": 1}
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    return {**body, **fields}


async def prefill_first(
    request: RemotePrefillRequest,
    hand_off_ready: HandOffReady,
    ask: Ask,
    hand_off: str,
    fields: Mapping[str, Any],
) -> None:
    """Prefill first, then decode: ``fields`` join the prefill request, its answer has ``hand_off``.

    Raises TemporaryError for an answer without it.
    """
    answer = await ask(request.path, prefill_body(request, **fields), request.request_id)
    taken = answer.get(hand_off)
    if not isinstance(taken, Mapping):
        raise TemporaryError(f"the engine's answer has no {hand_off}: it computed without handing off")
    await hand_off_ready({hand_off: dict(taken)}, cached_tokens_of(answer))


def cached_tokens_of(answer: Mapping[str, Any]) -> int | None:
    """Return the tokens of the prompt that came out of a cache, as an OpenAI answer says; None without it."""
    found: Any = answer
    for key in ("usage", "prompt_tokens_details", "cached_tokens"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if type(found) is int and found >= 0 else None
