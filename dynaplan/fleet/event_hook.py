"""A command or URL of the user's that is called at events: failed, scaled, a model moved, a GPU ill.

It runs beside everything else, in the fleet plugin: a hook that fails or hangs costs a line in the log.
Events of one kind are reported at most once in ``MIN_INTERVAL_S`` seconds; later ones go together.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from dynaplan.contract.hook_events import FAILED, GPU, MODEL, DecisionEventSource, HookEvent
from dynaplan.contract.model_keys import ModelEvent
from dynaplan.graph.lifecycle import Worker, WorkerState
from dynaplan.http.client import JSON_BODY, HttpClient
from dynaplan.process.subprocesses import kill_with_group, start_process
from dynaplan.util.clock import Clock
from dynaplan.util.errors import ConfigError
from dynaplan.util.masking import looks_secret

log = logging.getLogger(__name__)

ON_EVENT_VARIABLE = "DYNAPLAN_ON_EVENT"
"""The variable that holds the command or URL; ``serve --on-event`` sets it."""

EVENT_POLL_S = 5.0
"""Seconds between two polls for events."""

MIN_INTERVAL_S = 30.0
"""Seconds between two calls of the hook for events of one kind."""

CALL_TIMEOUT_S = 20.0
"""Seconds that a call may take; then it is ended."""

MAX_TEXTS = 20
"""The events that one call describes in words; the others are counted."""


def check_hook(target: str) -> None:
    """Raise ConfigError unless this is an http or https address, or a command whose program is there."""
    try:
        address = urlsplit(target)
        scheme, host = address.scheme, address.hostname
    except ValueError:  # brackets as around an IPv6 address, and none between them
        scheme, host = "http", None
    if "://" in target or scheme in ("http", "https"):
        if scheme not in ("http", "https") or not host:
            raise ConfigError(
                f"--on-event {target}: that is no address of a web server",
                hint="Write http://HOST/PATH or https://HOST/PATH, or a command.",
            )
        return
    try:
        words = shlex.split(target)
    except ValueError as error:
        raise ConfigError(f"--on-event {target}: {error}", hint="Quote it as a shell would.") from None
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(
            f"--on-event {target}: there is no program {words[0] if words else ''!r}",
            hint="Name one on the PATH, or its path, with its arguments; or an address: http://HOST/PATH.",
        )


class EventWatch:
    """Finds events by polling: the workers, the planner's decisions, decisions about models, and the GPUs.

    The first poll finds nothing: what was already so then is no event.
    """

    def __init__(
        self,
        workers: Callable[[], Iterable[Worker]],
        decisions: DecisionEventSource,
        models: Callable[[], Sequence[ModelEvent]] = tuple,
        gpus: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._workers = workers
        self._decisions = decisions
        self._models = models
        self._gpus = gpus
        self._gpu_events: Sequence[str] | None = None
        self._failed: frozenset[str] | None = None
        self._model_events: Sequence[ModelEvent] | None = None

    def poll(self) -> list[HookEvent]:
        return [*self._failures(), *self._decisions.poll(), *self._moves(), *self._illnesses()]

    def _illnesses(self) -> list[HookEvent]:
        before, self._gpu_events = self._gpu_events, tuple(self._gpus())
        new = [each for each in self._gpu_events if before is not None and each not in before]
        return [HookEvent(GPU, each) for each in new]

    def _moves(self) -> list[HookEvent]:
        before, self._model_events = self._model_events, tuple(self._models())
        if before is None:
            return []
        new = [each for each in self._model_events if each not in before]
        return [HookEvent(MODEL, f"{each.model}: {each.sentence}") for each in new]

    def _failures(self) -> Iterator[HookEvent]:
        failed = {each.name: each for each in self._workers() if each.state is WorkerState.FAILED}
        before, self._failed = self._failed, frozenset(failed)
        if before is not None:
            for name in sorted(failed.keys() - before):
                yield HookEvent(FAILED, f"{name} has failed: {failed[name].reason}")


@dataclass
class EventHook:
    """Passes events to a command, as JSON on its standard input, or posts the JSON to a URL."""

    target: str
    namespace: str
    watch: EventWatch
    clock: Clock
    _pending: dict[str, list[HookEvent]] = field(default_factory=dict)
    _next_s: dict[str, float] = field(default_factory=dict)

    async def run(self) -> None:
        """Poll for events and pass them on until it is cancelled."""
        while True:
            try:
                await self.poll()
            except Exception:
                log.exception("polling for events failed; it is tried again")
            await self.clock.sleep(EVENT_POLL_S)

    async def poll(self) -> None:
        for event in self.watch.poll():
            self._pending.setdefault(event.kind, []).append(event)
        for kind in tuple(self._pending):
            now_s = self.clock.now_s()
            if now_s >= self._next_s.get(kind, now_s):
                self._next_s[kind] = now_s + MIN_INTERVAL_S
                await self._call(kind, self._pending.pop(kind))

    async def _call(self, kind: str, events: list[HookEvent]) -> None:
        """Call the hook; whatever goes wrong is one line of the log."""
        texts = [event.text for event in events[:MAX_TEXTS]]
        document = {"event": kind, "namespace": self.namespace, "count": len(events), "texts": texts}
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await (self._post if "://" in self.target else self._run)(kind, json.dumps(document).encode())
        except TimeoutError:
            log.warning("--on-event: %s has not ended within %g s, for %s", self._show, CALL_TIMEOUT_S, kind)
        except Exception as error:
            log.warning("--on-event: %s failed, for %s: %s", self._show, kind, _describe(error))

    @property
    def _show(self) -> str:
        """Return the host of the hook's URL, or its command's program: arguments and paths may hold a key."""
        return urlsplit(self.target).hostname or shlex.split(self.target)[0]

    async def _run(self, kind: str, document: bytes) -> None:
        kept = {name: value for name, value in os.environ.items() if not looks_secret(name)}
        process = await start_process(
            *shlex.split(self.target),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={**kept, "DYNAPLAN_EVENT": kind},
            start_new_session=True,
        )
        try:
            await process.communicate(document)
        finally:
            kill_with_group(process)
            await process.wait()
        if process.returncode:
            raise HookFailed(f"exit code {process.returncode}")

    async def _post(self, kind: str, document: bytes) -> None:
        async with HttpClient(keeps_connections=False, connect_timeout_s=CALL_TIMEOUT_S) as http:
            answer = await http.request("POST", self.target, document, JSON_BODY, timeout_s=None)
        if answer.status >= 300:
            raise HookFailed(f"it answers {answer.status}")


class HookFailed(Exception):
    """A hook that says so: by its exit code, or by the status of its answer."""


def _describe(error: Exception) -> str:
    """Return the error's description, without the hook's address or arguments."""
    return str(error) if isinstance(error, HookFailed) else type(error).__name__
