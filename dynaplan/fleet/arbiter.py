# mypy: disallow-untyped-calls=False
# (circus is not typed)
"""The circus arbiter inside the ``serve`` process.

Five things differ from circus' own: a child's end is noticed at once (SIGCHLD) instead of at the next
check; signals are the caller's business; ``circusctl quit`` takes the orderly way out; a check that
collides with a command is skipped in silence, because the next one comes anyway; and services that listen on
the public port find its socket as their standard input.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

import zmq
from circus.arbiter import Arbiter
from circus.commands import errors
from circus.controller import Controller
from circus.exc import ConflictError
from circus.watcher import Watcher
from tornado.ioloop import IOLoop

from dynaplan.fleet.circus_client import EXIT_CODES_COMMAND, OURSELVES, REPLACE_EVENT, SENDER
from dynaplan.fleet.reattach.processes import RetryingWatcher, SupervisedFleet
from dynaplan.fleet.watchers import WatcherSpec, service_of
from dynaplan.util.documents import object_field, parse_object, text_field

log = logging.getLogger(__name__)

CHECK_DELAY_S = 5.0
"""Time between two checks by circus of its processes, in seconds. SIGCHLD reports their ends at once."""

COLLISION_DELAY_S = 0.02
REAP_INTERVAL_S = 0.1
"""The least time between two checks on SIGCHLD, so that a watcher that dies at once cannot spin."""


class _NoSignals:
    """A replacement of circus' SysHandler, which would turn SIGHUP into a restart of every worker."""

    def stop(self) -> None:
        """Do nothing: no signal handler was registered."""


class _Controller(Controller):
    """Takes circus' commands, and carries them out; ``answer`` says what becomes of a person's."""

    def _init_syshandler(self) -> None:
        self.sys_hdl = _NoSignals()  # type: ignore[assignment]

    def dispatch(self, job: tuple[bytes, bytes]) -> None:
        """Carry a command out: by circus, but a person's as ``answer`` says.

        A refused command is answered with an error; a worker to replace is named to the fleet plugin, which
        asks for the exit codes that were published before it listened.
        """
        client, text = job
        try:
            message = parse_object(text)
            command, properties = text_field(message, "command"), object_field(message, "properties", {})
        except ValueError:
            message, command, properties = {SENDER: OURSELVES}, "", {}  # circus says what is wrong with it
        judged = CommandAnswer()
        if message.get(SENDER) != OURSELVES:
            workers = [each.name for each in self.arbiter.watchers if _is_worker(each)]
            judged = answer(command, properties, workers, self.arbiter.servers)
        identifier, is_cast = message.get("id"), message.get("msg_type") == "cast"
        if judged.refusal:
            errno = errors.COMMAND_ERROR
            self.send_error(identifier, client, text, judged.refusal, cast=is_cast, errno=errno)
        elif judged.to_replace:
            for name in judged.to_replace:
                self.arbiter.get_watcher(name).notify_event(REPLACE_EVENT, {"name": name})
            self.send_ok(identifier, client, text, cast=is_cast)
        elif command == EXIT_CODES_COMMAND:
            self.send_ok(identifier, client, text, {"exit_codes": self.arbiter.exit_codes}, cast=is_cast)
        else:
            super().dispatch(job)


def _is_worker(watcher: Watcher) -> bool:
    return "--service-name" in (watcher.args or ())


class ServeArbiter(Arbiter):
    """An arbiter on the running event loop; ``on_quit`` is awaited in place of circus' own stop.

    Workers of the services called ``listeners`` get the ``public_socket`` as their standard input. With
    ``supervised_fleet`` a supervisor starts all processes, and ends that of ``plugin`` together with this
    one. ``servers`` are the names of the first watchers but those of workers: the embedded servers, and the
    fleet plugin.
    """

    def __init__(
        self,
        specs: Sequence[WatcherSpec],
        endpoint: str,
        events: str,
        plugin: WatcherSpec,
        log_file: str,
        on_quit: Callable[[], Awaitable[None]],
        public_socket: socket.socket | None = None,
        listeners: Collection[str] = (),
        supervised_fleet: SupervisedFleet | None = None,
    ) -> None:
        self._public_socket = public_socket
        self._listeners = listeners
        self._supervised_fleet = supervised_fleet
        watchers = [
            RetryingWatcher(spec.name, spec.cmd, args=spec.args, **spec.options) for spec in (*specs, plugin)
        ]
        for watcher in watchers:
            self._prepare(watcher, ends_with_serve=watcher.name == plugin.name)
        self._on_quit = on_quit
        self._reap_timer: asyncio.TimerHandle | None = None
        self._reaped_s = 0.0
        super().__init__(
            watchers,
            endpoint,
            events,
            check_delay=CHECK_DELAY_S,
            loop=IOLoop.current(),
            proc_name="dynaplan",
            loglevel="warning",
            logoutput=shlex.quote(log_file),
        )
        self.servers = frozenset(each.name for each in self.watchers if not _is_worker(each))

    @property
    def exit_codes(self) -> dict[int, int]:
        """The exit codes, by pid, of what the supervisor has seen end lately; empty without a supervisor."""
        return self._supervised_fleet.exit_codes if self._supervised_fleet else {}

    def add_watcher(self, name: str, cmd: str, **options: Any) -> Any:
        """Add a watcher: circus' command ``add``, with which the fleet plugin starts workers."""
        watcher = super().add_watcher(name, cmd, **options)
        self._prepare(watcher)
        return watcher

    def _prepare(self, watcher: Any, *, ends_with_serve: bool = False) -> None:
        if self._supervised_fleet:
            self._supervised_fleet.use_supervisor(watcher, ends_with_serve=ends_with_serve)
        self._let_listen(watcher)

    def _let_listen(self, watcher: Any) -> None:
        """Have the watcher's process find the public socket at descriptor 0, if its service listens.

        circus has ``stdin_socket`` for this, but only for sockets that it has made and listens on itself. No
        other descriptor survives ``close_fds``, which keeps this one from all other processes.
        """
        if self._public_socket and service_of(watcher.args) in self._listeners:
            watcher._get_stdin_socket_fd = self._public_socket.fileno

    def _init_context(self, context: Any) -> None:
        self.context = zmq.Context()
        self._ensure_ioloop()
        self.ctrl = _Controller(self.endpoint, None, self.context, self.loop, self, self.check_delay, None)

    def stop(self) -> Any:
        """End the deployment in order: the answer to ``circusctl quit``."""
        return asyncio.ensure_future(self._on_quit())

    async def end(self) -> None:
        """Stop what is left at once, and close the endpoints."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        if self._supervised_fleet:
            asyncio.get_running_loop().remove_reader(self._supervised_fleet.link.fileno())
        if self._reap_timer:
            self._reap_timer.cancel()
        await self._emergency_stop()
        self.context.destroy(linger=0)

    def listen_again(self) -> None:
        """Recreate the two sockets at their addresses: their files were deleted. Raises ZMQError."""
        assert self.ctrl is not None and self.evpub_socket is not None  # they are there from its start on
        listeners = ((self.ctrl.ctrl_socket, self.endpoint), (self.evpub_socket, self.pubsub_endpoint))
        for listener, endpoint in listeners:
            with suppress(zmq.ZMQError):
                listener.unbind(endpoint)
            listener.bind(endpoint)

    def kill_process_of(self, name: str) -> None:
        """SIGKILL the process of a watcher; nothing happens without one."""
        for process in list(self.get_watcher(name).processes.values()):
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def reap_processes(self) -> None:
        """Reap exited processes, this one's own and the supervisor's."""
        super().reap_processes()
        if self._supervised_fleet:
            self._supervised_fleet.reap()

    def manage_watchers(self) -> Any:
        """Run circus' periodic check of its watchers; skip it while a command is being carried out."""
        try:
            return super().manage_watchers()
        except ConflictError:
            return None

    def reap_on_sigchld(self) -> None:
        """Reap exited processes on every SIGCHLD, not only once in circus' interval."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap_soon)
        if self._supervised_fleet:
            self._supervised_fleet.notify_on_exit(asyncio.get_running_loop(), self._reap_soon)
        # CPython's warning of a full buffer takes a lock in the signal handler, where it may wait for ever.
        signal.set_wakeup_fd(signal.set_wakeup_fd(-1), warn_on_full_buffer=False)

    def _reap_soon(self) -> None:
        if self._reap_timer is None:
            delay_s = max(0.0, self._reaped_s + REAP_INTERVAL_S - time.monotonic())
            self._reap_timer = asyncio.get_running_loop().call_later(delay_s, self._reap)

    def _reap(self) -> None:
        self._reap_timer = None
        self._reaped_s = time.monotonic()
        if self._exclusive_running_command is not None:
            self._reap_timer = asyncio.get_running_loop().call_later(COLLISION_DELAY_S, self._reap)
        else:
            self.manage_watchers()


_WHOLE_DEPLOYMENT = {
    "stop": "`dynaplan stop`, or circusctl quit, ends the deployment in order",
    "start": "everything runs already; `dynaplan scale decode=N` starts workers",
    "restart": "name one worker, as in: circusctl restart dynamo_VllmWorker",
    "reload": "name one worker, as in: circusctl restart dynamo_VllmWorker",
    "reloadconfig": "circus has no file of it; `dynaplan reload` takes the graph's",
}

_OF_A_WORKER = {
    "incr": "`dynaplan scale decode=N`, or prefill=N, sets the number of workers",
    "decr": "`dynaplan scale decode=N`, or prefill=N, sets the number of workers and drains the others",
    "stop": "`dynaplan scale decode=N`, or prefill=N, drains the workers that are too many; "
    "circusctl restart {name} replaces this one",
    "start": "it is started by itself; `dynaplan scale decode=N`, or prefill=N, tries failed ones again",
    "reload": "circusctl restart {name} drains it, and starts another in its place",
    "rm": "`dynaplan scale decode=N`, or prefill=N, removes workers after their requests",
    "set": "options are given to `dynaplan serve`, which sets them for all workers of a service",
}

_OF_A_SERVER = dict.fromkeys(
    ("incr", "decr", "stop", "reload", "rm", "set"),
    "circusctl restart {name} starts it anew; `dynaplan stop` ends the deployment in order",
)
"""Of what is there once, and only circus starts: the key-value store, NATS, the fleet plugin."""


@dataclass(frozen=True)
class CommandAnswer:
    """The answer to a command: a refusal in words, or workers to replace; neither means "carry it out"."""

    refusal: str = ""
    to_replace: tuple[str, ...] = ()


def answer(
    command: str, properties: Mapping[str, Any], workers: Collection[str], servers: Collection[str] = ()
) -> CommandAnswer:
    """Return what becomes of a person's command.

    ``workers`` and ``servers`` are the names of the workers' watchers, and of all others.
    """
    command, pattern = command.lower(), properties.get("name")
    if not isinstance(pattern, str) or not pattern:
        words = _WHOLE_DEPLOYMENT.get(command)
        return CommandAnswer(refusal=f"{command} of everything: {words}") if words else CommandAnswer()
    is_named = _matcher(pattern, properties.get("match"))
    if named := tuple(filter(is_named, workers)):
        if command == "restart":
            return CommandAnswer(to_replace=named)
        return _refusal(_OF_A_WORKER, command, named[0], "a worker of dynaplan")
    if named := tuple(filter(is_named, servers)):
        return _refusal(_OF_A_SERVER, command, named[0], "a process that the deployment needs")
    return CommandAnswer()


def _refusal(refused: Mapping[str, str], command: str, name: str, what: str) -> CommandAnswer:
    words = refused.get(command)
    return CommandAnswer(f"{name} is {what}: {words.format(name=name)}") if words else CommandAnswer()


def _matcher(pattern: str, match: object) -> Callable[[str], bool]:
    """Return the test by which circus finds names: without case, by a glob or a regular expression."""
    try:
        regular = re.compile(pattern.lower() if match == "regex" else translate(pattern.lower()))
    except re.error:  # circus says what is wrong with it
        return lambda _: False
    return lambda name: regular.match(name.lower()) is not None
