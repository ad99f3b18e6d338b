"""An engine that runs as a server of its own: a child of the worker, driven by its ``ServerKind``."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dynaplan.config.command_words import COMMAND
from dynaplan.config.service_config import ServiceConfig
from dynaplan.config.settings.worker import WorkerSettings
from dynaplan.engines.held_hand_offs import HeldHandOffs
from dynaplan.engines.model_memory import memory_need
from dynaplan.engines.port import BlockChangesCallback, EngineContext, HandOffReady
from dynaplan.engines.server.block_events import BlockEvents
from dynaplan.engines.server.child import EngineChild, describe_exit, run_bounded, wait_until_ready
from dynaplan.engines.server.client import ServerClient
from dynaplan.engines.server.engine_options import Options, lora_names, physical_gpus
from dynaplan.engines.server.engine_watchdog import EngineWatchdog
from dynaplan.engines.server.kind import EXIT_USAGE, PID, STOP_COMMAND, Ask, LaunchLine, ServerKind
from dynaplan.engines.server.metrics import EngineMetrics, read_metrics
from dynaplan.engines.server.sleep import EngineSleep
from dynaplan.engines.server.start_lock import HOST, bounded_start, exclusive_start
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.events.prefill_requests import RemotePrefillRequest
from dynaplan.http.routes import Route
from dynaplan.process.memory import box_memory
from dynaplan.process.node_directory import node_dir
from dynaplan.process.port_leases import PortLease, lease_port, lease_ports
from dynaplan.store.instances import is_loopback
from dynaplan.util.clock import SystemClock
from dynaplan.util.documents import MAX_WHOLE
from dynaplan.util.errors import (
    ConfigError,
    DynaplanError,
    PermanentError,
    ProgramEnded,
    TemporaryError,
    WorkerStartFailed,
)
from dynaplan.util.masking import mask_secrets

log = logging.getLogger(__name__)

IDLE_CHECK_TIMEOUT_S = 1.0
"""The seconds that an engine has, when it is to end, to answer that it has no requests."""

LEFT_FOREGROUND = (
    "The command ended with 0: it must stay in the foreground as long as its server runs "
    "(docker and docker compose without -d, a shell's command without &)."
)


class ServerEngine:
    """``dynaplan.engines.port.Engine`` for an engine with an HTTP server of its own, on a port of 127.0.0.1.

    Raises ConfigError for an option that is wrong.
    """

    def __init__(self, kind: ServerKind, options: Options, context: EngineContext) -> None:
        kind.check(options, context.gpus)
        self._kind = kind
        self._options = options
        self._context = context
        self._client = ServerClient("", context.token, takes_any_status=kind.takes_any_status)
        self._child: EngineChild | None = None
        self._lease: PortLease | None = None
        self._launch_files: tuple[Path, ...] = ()
        self._holds = HeldHandOffs()
        self._blocks: BlockEvents | None = None
        self._model: Mapping[str, Any] = {}
        self._is_stopping = False
        self._sleep = EngineSleep(kind.sleep_paths, self._client)
        hang_timeout_s = WorkerSettings.from_options(options).hang_timeout_s
        self._watch = EngineWatchdog(
            self._read,
            SystemClock(),
            hang_timeout_s,
            request_slots=kind.request_slots(options),
            # The other side of a hand-off may take its time: to compute, or to fetch what fills the KV cache.
            waits_for_others=context.role == "prefill" or bool(options.get("remote-prefill")),
        )

    def subscribe_kv_events(self, changed: BlockChangesCallback) -> bool:
        """Call back with what the engine publishes of its blocks.

        False, and why in the log, if it does not.
        """
        try:
            why = self._kind.no_kv_events_reason(self._options)
            if not why:
                self._blocks = BlockEvents(self._context, changed)
        except ConfigError as error:
            why = str(error)
        if why:
            log.warning("%s does not tell which KV blocks it holds: %s", self._kind.name, why)
            return False
        self._context = replace(self._context, publishes_kv_events=True)
        return True

    async def start(self) -> None:
        """Start the server and return when it answers.

        Raises WorkerStartFailed when no other start can help (exit code 2). Raises TemporaryError with its
        last lines when it ends, ProgramEnded if so by its owner's command, or takes longer than
        ``start-timeout``.
        """
        try:
            if not await self._try_to_start():
                log.warning("the engine's port was taken meanwhile: trying another one")
                if not await self._try_to_start():
                    raise TemporaryError(f"{self._kind.name} found its port taken twice")
            self._model = await self._first_model()
            if self._blocks:
                self._blocks.start()
            await self._watch.poll()
            self._watch.start()
        except BaseException:
            await self._end(0)
            raise

    def routes(self) -> Sequence[Route]:
        return ()

    def card(self) -> Mapping[str, Any]:
        """Describe the model: the engine's name for it, its context and KV block in tokens (0: unknown)."""
        options, kind = self._options, self._kind
        context = self._model.get("max_model_len") or options.get("max-model-len")
        block = self._watch.signals.block_tokens or options.get("block-size")
        own_template = options.get("chat-template")
        own = "" if kind.accepts_any_model else self._model.get("id")
        names = (own, options.get("served-model-name"), self._model.get("id"), options.get("model"))
        model = next((str(name) for name in names if name), "")
        return {
            "model": model,
            "context_tokens": _tokens(context),
            "tokenizer": str(options.get("tokenizer") or options.get("model")),
            "kv_block_tokens": _tokens(block),
            "engine": kind.name,
            "role": self._context.role,
            **({"chat_template": _template_text(own_template)} if own_template else {}),
            **({"loras": loras} if (loras := lora_names(options.get("lora-modules"))) else {}),
            **(
                {"requires_remote_prefill": True}
                if kind.requires_remote_prefill(options, self._context)
                else {}
            ),
        }

    def load(self) -> WorkerLoad:
        return self._watch.load()

    @property
    def url(self) -> str:
        return self._client.url

    async def count_requests(self) -> int:
        if not self._kind.reports_requests:
            raise PermanentError(f"{self._kind.name} does not tell how many requests it has at this moment")
        return await self._watch.count_requests()

    async def sleep(self, level: str) -> str:
        reason = await self._sleep.sleep(level)
        await self._watch.poll()
        return reason

    async def wake(self) -> str:
        """Wake a sleeping engine, let a paused one go on; see ``dynaplan.engines.port.ServingEngine``."""
        reason = await self._sleep.wake(self._watch.signals)
        await self._watch.poll()
        return reason

    def metrics(self) -> Mapping[str, float]:
        """The engine's own samples, and the hand-offs that wait to be taken."""
        holds = {
            "dynaplan:kv_hand_offs_held": float(self._holds.held),
            "dynaplan:kv_hand_offs_expired_total": float(self._holds.expired),
        }
        told = self._blocks.metrics() if self._blocks else {}
        return {**self._watch.metrics(), **told, **(holds if self._context.role == "prefill" else {})}

    async def wait_for_failure(self) -> None:
        """Raise PermanentError once the engine has ended unasked or is hung; its remains are killed."""
        child = self._require_child()
        way = await first_of(child.wait(), self._wait_until_hung(), self._wait_for_lost_part(child))
        if self._is_stopping:  # it was asked to end
            await asyncio.Event().wait()
        why = describe_exit(way) if isinstance(way, int) else way
        child.kill()
        raise PermanentError(f"{self._kind.name} {why}\n{child.last_lines()}")

    async def _wait_until_hung(self) -> str:
        return f"hangs: {await self._watch.wait_until_hung()}"

    async def _wait_for_lost_part(self, child: EngineChild) -> str:
        return f"has lost a process: {await child.wait_for_lost_part(self._kind.parts)}"

    async def prefill(self, request: RemotePrefillRequest, hand_off_ready: HandOffReady) -> None:
        """Compute the prompt, by the engine's own protocol; see
        ``dynaplan.engines.port.RemotePrefillEngine``.

        Raises PermanentError when the engine refuses the request (4xx), TemporaryError when it fails.
        """
        lease = self._lease
        if not self._kind.prefills or lease is None:
            raise PermanentError(f"{self._kind.name} does not prefill for others")

        async def hand_over_and_hold(fields: Mapping[str, Any], cached_tokens: int | None = None, /) -> None:
            """Hold first: the release may come before the decode side's answer to the hand-over."""
            if self._kind.holds_hand_offs:
                self._holds.hold(request.request_id)
            try:
                await hand_off_ready(fields, cached_tokens)
            except BaseException:
                self._holds.release(request.request_id)
                raise

        if self._watch.signals.is_asleep:
            await self.wake()
        ask = partial(self._ask, trace=request.trace)
        await self._run_prefill(request, hand_over_and_hold, ask, lease.ports)

    async def _run_prefill(
        self, request: RemotePrefillRequest, hand_off_ready: HandOffReady, ask: Ask, ports: Sequence[int]
    ) -> None:
        await self._kind.prefill(request, hand_off_ready, ask, ports)

    @property
    def waits_for_release(self) -> bool:
        return self._kind.prefills and self._kind.holds_hand_offs

    def release(self, request_id: str) -> None:
        self._holds.release(request_id)

    def release_all(self) -> None:
        self._holds.release_all()

    async def stop(self, *, keeps_cache: bool = False) -> None:
        """Wait until held hand-offs have been taken or have expired, then end the server.

        Cancelled, it kills the server at once.
        """
        grace_s = 0.0
        try:
            if self._child is not None and self._holds.held:
                await first_of(self._holds.wait_empty(), self._child.wait())
            if keeps_cache and self._child is not None:
                await self._save_cache()
            grace_s = await self._term_grace_s()
        finally:
            self._is_stopping = True
            await self._end(grace_s)

    async def _save_cache(self) -> None:
        """Save the KV cache for the next start, within seconds; never raises. By default nothing is saved."""

    async def _term_grace_s(self) -> float:
        """The seconds that the server gets to end by itself; 0 where SIGTERM would only make clients hang."""
        if self._kind.stalls_on_term and not await self._is_idle():
            return 0.0
        return self._kind.term_grace_s

    async def _is_idle(self) -> bool:
        """True when the server says at once that it has no requests."""
        if self._child is None or self._child.has_exited:
            return False
        try:
            async with asyncio.timeout(IDLE_CHECK_TIMEOUT_S):
                return await self._watch.count_requests() == 0
        except (TemporaryError, TimeoutError):
            return False

    async def _try_to_start(self) -> bool:
        """Start the server once; False when it ended because its port was taken."""
        kind, directory = self._kind, node_dir(os.environ)
        own_url = kind.own_url(self._options)
        if own_port := _port_here(own_url):
            self._lease = lease_port(own_port, directory)
        else:
            count = kind.ports_needed(self._options, self._context)
            self._lease = lease_ports(count, directory, avoided=_own_ports())
        self._client.url = own_url or f"http://127.0.0.1:{self._lease.ports[0]}"
        launch = kind.command(self._options, self._context, self._lease.ports)
        async with self._turn_to_start(directory):
            self._write(launch)
            log.info("starting %s: %s", kind.name, " ".join(mask_secrets(launch.argv)))
            child = EngineChild.spawn(
                launch.argv, launch.environment, self._lease.descriptors, self._context.token
            )
            self._child = child
            if await self._wait_until_ready(child):
                return True
        lines = child.last_lines()
        code = await child.wait()
        await self._end_what_was_left()
        await self._end(0)
        if any(text in lines for text in kind.address_in_use):
            return False
        raise self._start_failure(code, lines)

    def _start_failure(self, code: int, lines: str) -> DynaplanError:
        """Return the error for a server that has ended before it answered."""
        told = f"{self._kind.name} {describe_exit(code)} while starting; its last lines:\n{lines}"
        if code == EXIT_USAGE:
            return WorkerStartFailed(told)
        if code < 0 or COMMAND not in self._options:
            return TemporaryError(told)
        return ProgramEnded(told if code else f"{told.rstrip()}\n{LEFT_FOREGROUND}")

    def _turn_to_start(self, directory: Path) -> AbstractAsyncContextManager[None]:
        """Return the context to start in: alone on its GPUs, or when cores and memory bear one more."""
        if gpus := physical_gpus(os.environ):
            return exclusive_start(gpus, directory)
        if not self._kind.measures_memory:
            return nullcontext()
        given_bytes = self._kind.given_memory_bytes(os.environ)
        if not given_bytes:
            return exclusive_start([HOST], directory)
        need = memory_need(self._kind.name, self._options, self._context.gpus)
        weights_bytes = need.weights_bytes if need else 0.0
        return bounded_start(given_bytes + weights_bytes, directory, lambda: box_memory().available_bytes)

    async def _wait_until_ready(self, child: EngineChild) -> bool:
        """Wait until it answers; False when it has ended, TemporaryError when it takes too long."""
        timeout_s = WorkerSettings.from_options(self._options).start_timeout_s
        return await wait_until_ready(child, self._client, self._kind.ready_path, self._kind.name, timeout_s)

    async def _first_model(self) -> Mapping[str, Any]:
        """The engine's own description of its model; empty when it cannot be asked."""
        try:
            models = (await self._client.json("/v1/models")).get("data")
        except TemporaryError as error:
            log.warning("the engine does not say what it serves: %s", error)
            return {}
        return models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}

    async def _read(self) -> EngineMetrics:
        kind = self._kind
        text = await self._client.text(kind.metrics_path, kind.metrics_timeout_s)
        signals = read_metrics(text, kind.metric_names)
        if signals.counters:
            signals = replace(signals, counters=replace(signals.counters, at_s=time.monotonic()))
        return await self._sleep.with_pause(signals)

    async def _ask(
        self, path: str, body: Mapping[str, Any], request_id: str, trace: Mapping[str, str]
    ) -> Mapping[str, Any]:
        """Post a request to the engine, which gets its own name for the model, unless an adapter is named."""
        card = self.card()
        model = body.get("model") if body.get("model") in card.get("loras", ()) else card["model"]
        return await self._client.ask(path, {**body, "model": model}, request_id, trace)

    async def _end(self, grace_s: float) -> None:
        """Shut down; the port lease is released once nothing listens on its ports any more.

        Nothing is awaited before the server is told to end: a cancellation there would leave it running. Nor
        may anything fail there.
        """
        self._watch.stop()
        child, self._child = self._child, None
        try:
            if child is not None:
                await child.stop(grace_s, self._stop_command(child))
        finally:
            if self._blocks:
                self._blocks.close()
            for file in self._launch_files:
                file.unlink(missing_ok=True)
            self._launch_files = ()
            if self._lease is not None:
                self._lease.close()
                self._lease = None
            await self._client.close()

    def _stop_command(self, child: EngineChild) -> Sequence[str]:
        """Return the command that ends the server in the place of SIGTERM; none without its pid."""
        port = self._lease.ports[0] if self._lease else 0
        try:
            return self._kind.stop_command(self._options, port, child.engine_pid)
        except OSError as error:
            log.warning("the engine gets SIGTERM, as its pid is not known: %s", error)
            return ()

    async def _end_what_was_left(self) -> None:
        """Run the owner's stop command after a start that failed, if it needs no pid.

        A container of an earlier life, which is no child and outlives a SIGKILL of all, may have the name.
        """
        if PID not in str(self._options.get(STOP_COMMAND, PID)):
            port = self._lease.ports[0] if self._lease else 0
            await run_bounded(self._kind.stop_command(self._options, port, 0), self._kind.term_grace_s)

    def _write(self, launch: LaunchLine) -> None:
        self._launch_files = tuple(launch.files)
        for path, text in launch.files.items():
            path.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(path, flags, 0o600), "w") as file:
                file.write(text)

    def _require_child(self) -> EngineChild:
        if self._child is None:
            raise PermanentError(f"{self._kind.name} does not run")
        return self._child


async def first_of(*ways: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of the coroutine that ends first; the others are cancelled."""
    tasks = [asyncio.create_task(way) for way in ways]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()


def _port_here(url: str) -> int:
    """Return the port of an address of this machine, such as ``http://127.0.0.1:8080/api``; else 0."""
    parts = urlsplit(url)
    return (parts.port or 80) if url and is_loopback(parts.hostname or "") else 0


def _own_ports() -> frozenset[int]:
    """Return the ports on which servers of this deployment listen by their option ``url``."""
    sections = ServiceConfig.get_instance().values()
    return frozenset(_port_here(str(each["url"])) for each in sections if each.get("url"))


def _template_text(template: Any) -> str:
    """A chat template as the card has it: the path of its file, or its text."""
    try:
        file = Path(os.path.expanduser(str(template)))
        return str(file.absolute()) if file.is_file() else str(template)
    except (OSError, ValueError, RuntimeError):
        return str(template)


def _tokens(value: Any) -> int:
    """The number of tokens that an engine or an option states; 0 for an invalid one."""
    return value if type(value) is int and 0 <= value <= MAX_WHOLE else 0
