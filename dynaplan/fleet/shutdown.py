# mypy: disallow-untyped-calls=False
# (circus is not typed)
"""The end of a deployment: it is requested, requests in flight are drained, and every process is ended.

1. ``StopRequest``: the first signal ends in order, the second at once.
2. ``Shutdown``: first the services that take requests end, then the workers, then the servers. Nothing can
   hold it up: at the deadline every process that is left is killed, with its whole session.
3. ``drain``: the user reads meanwhile how many requests are in flight, and at the end who stays.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import psutil
from circus.process import DEAD_OR_ZOMBIE, UNEXISTING

from dynaplan.fleet.arbiter import ServeArbiter
from dynaplan.fleet.launch import Launch
from dynaplan.fleet.reattach.processes import PUBLIC_SOCKET_NAME
from dynaplan.fleet.rules.observing import unmanaged
from dynaplan.fleet.watchers import service_of, services_stopped_first
from dynaplan.graph.lifecycle import Worker
from dynaplan.graph.model import GraphSpec
from dynaplan.http.client import try_get
from dynaplan.process.ports import Processes
from dynaplan.process.supervisor_link import SupervisorLink
from dynaplan.store import connections
from dynaplan.store.instances import SERVICES_PREFIX, Instance
from dynaplan.util.durations import clock
from dynaplan.util.errors import PermanentError, TemporaryError
from dynaplan.util.progress import ProgressLine
from dynaplan.util.terminal import try_write

log = logging.getLogger(__name__)

EXIT_POLL_S = 0.02
PLUGIN_S = 0.5
"""Longest time for the fleet plugin to end, in seconds; all it knows is on the disk."""

RESERVED_S = 2.0
"""Time before the deadline, in seconds, at which the workers are signalled even if a Frontend is not done."""

AFTER_KILL_S = 1.0

CLEAN_UP_S = 3.0
"""Longest time for cleaning up after a killed worker: its engine's shared memory must be removed."""

STORE_TIMEOUT_S = 1.0
"""Longest time for the store to list the unmanaged workers, in seconds."""


class StopRequest:
    """The request to stop, by a signal, ``circusctl quit`` or a failure; the second one hurries.

    ``report()`` is called at the first.
    """

    def __init__(self, report: Callable[[], None]) -> None:
        self._report = report
        self.requested = asyncio.Event()
        self.hurried = asyncio.Event()

    @property
    def is_hurried(self) -> bool:
        return self.hurried.is_set()

    def request(self) -> None:
        """Ask for the end in order; asked again, for the end at once."""
        if self.requested.is_set():
            self.hurried.set()
        else:
            self._report()
            self.requested.set()

    def handle_signals(self) -> None:
        """Have SIGINT and SIGTERM request the stop.

        Not by the event loop's own handlers: it removes these when it closes, before everything is released,
        and a signal in between would end the process in the midst of the release.
        """
        loop = asyncio.get_running_loop()

        def stop(number: int, frame: FrameType | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.request)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)


@dataclass
class Shutdown:
    """Ends everything that this ``serve`` started.

    ``killed`` holds the names of the processes that had to be killed. ``public_socket`` is this process's
    copy of the socket that the Frontends listen on. ``link`` leads to the supervisor, where that is the
    parent.
    """

    arbiter: ServeArbiter
    graph: GraphSpec
    plugin_name: str
    processes: Processes
    drain_timeout_s: float
    report: Callable[[str], None]
    public_socket: socket.socket | None = None
    link: SupervisorLink | None = None
    killed: list[str] = field(default_factory=list)
    is_hurried: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, question: asyncio.Future[Any] | None = None) -> None:
        """Return when nothing is left, within the drain deadline and about two seconds.

        The servers end last of all, after ``question`` is done, which needs their answers; it is not waited
        for when the stop is requested a second time.
        """
        deadline_s = time.monotonic() + self.drain_timeout_s
        await self._end_plugin()
        first = self._watchers_of(self.services_stopped_first())
        services = {service.name for service in self.graph.services}
        rest = [name for name in self._watchers_of(services) if name not in first]
        for names, until_s in (
            (first, deadline_s - min(RESERVED_S, self.drain_timeout_s / 4)),
            (rest, deadline_s),
        ):
            self._signal(names, signal.SIGTERM)
            self._stop_listening()
            await self._wait_gone(names, until_s)
        await self._wait_gone([*first, *rest], deadline_s)
        self._kill([*first, *rest])
        while question and not question.done() and not self.is_hurried.is_set():
            await asyncio.sleep(EXIT_POLL_S)
        await self.arbiter.end()
        self._kill_strays()

    def _stop_listening(self) -> None:
        """Close our copy of the public socket: with the last Frontend's, connections are refused."""
        if self.public_socket:
            self.public_socket.close()
            if self.link:
                self.link.drop(PUBLIC_SOCKET_NAME)

    async def _end_plugin(self) -> None:
        """Stop the fleet plugin, so that nothing is started any more; ``respawn`` would bring it back."""
        watcher = self.arbiter.get_watcher(self.plugin_name)
        watcher.graceful_timeout = PLUGIN_S
        await watcher._stop()

    def services_stopped_first(self) -> set[str]:
        """Name the planner, the Frontends, and the entry service, which takes requests whatever its role."""
        return services_stopped_first(self.graph)

    def _watchers_of(self, services: Collection[str]) -> list[str]:
        """Return the watchers of these services' workers; the service is in a watcher's command line."""
        return [watcher.name for watcher in self.arbiter.watchers if service_of(watcher.args) in services]

    def _pids(self, names: Iterable[str]) -> dict[int, str]:
        """The processes of these watchers that still run."""
        return {
            process.pid: name
            for name in names
            for process in list(self.arbiter.get_watcher(name).processes.values())
            if process.status not in (DEAD_OR_ZOMBIE, UNEXISTING)
        }

    def _signal(self, names: Iterable[str], number: int) -> None:
        for pid, name in self._pids(names).items():
            self.arbiter.get_watcher(name).send_signal(pid, number)

    async def _wait_gone(self, names: Collection[str], until_s: float) -> None:
        while self._pids(names) and time.monotonic() < until_s and not self.is_hurried.is_set():
            await asyncio.sleep(EXIT_POLL_S)

    def _kill(self, names: Collection[str]) -> None:
        pids = self._pids(names)
        self.killed += pids.values()
        started = {pid: self.processes.identify(pid) or 0 for pid in pids}
        for waits_s in (0.0, CLEAN_UP_S):  # all are killed before one is waited for
            for pid, started_at in started.items():
                self.processes.kill_group(pid, started_at, waits_s)
        if self.killed and not self.is_hurried.is_set():
            held = ", ".join(self.killed)
            self.report(
                f"Not done within {self.drain_timeout_s:g} s, killed: {held}. What they held is lost."
            )

    def _kill_strays(self) -> None:
        """Whatever descends still from this process, or its supervisor: the subreaper of the workers'
        orphans."""
        root = psutil.Process(self.link.supervisor_pid if self.link else None)
        strays = [each for each in root.children(recursive=True) if each.pid != os.getpid()]
        for stray in strays:
            try:
                stray.kill()
            except psutil.NoSuchProcess:
                continue
        for process in self._left_of(strays):
            self.report(f"Process {process.pid} does not end, even killed; it may keep a GPU.")

    def _left_of(self, strays: list[psutil.Process]) -> list[psutil.Process]:
        """Wait for killed processes; return the ones that do not end.

        With a supervisor, which reaps them, its reports of their ends are read meanwhile.
        """
        if not self.link:
            return psutil.wait_procs(strays, timeout=AFTER_KILL_S)[1]
        deadline_s = time.monotonic() + AFTER_KILL_S
        while strays and time.monotonic() < deadline_s:
            self.link.poll()
            strays = [each for each in strays if _runs(each)]
            time.sleep(EXIT_POLL_S if strays else 0)
        return strays


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def drain(shutdown: Shutdown, launch: Launch, workers: Sequence[Worker]) -> None:
    """End everything; show the requests in flight meanwhile, and at the end the workers that stay."""
    stays = asyncio.create_task(unmanaged_workers(launch.namespace), name="unmanaged workers")
    takers = shutdown.services_stopped_first()
    urls = [each.url for each in workers if each.component in takers and each.url]
    display = asyncio.create_task(show_drain(urls, launch.drain_timeout_s), name="drain display")
    try:
        await shutdown.run(stays)
    finally:
        stays.cancel()
        display.cancel()
        await asyncio.wait({stays, display})
    if not stays.cancelled() and stays.result():
        shutdown.report(stays.result())


async def unmanaged_workers(namespace: str) -> str:
    """Return a line about the unmanaged components that are registered; empty when none is known."""
    # In a thread: it imports the store's client, for which nothing that ends meanwhile is to wait.
    store = await asyncio.to_thread(connections.connect_store)
    try:
        async with asyncio.timeout(STORE_TIMEOUT_S):
            items = await store.list(f"{SERVICES_PREFIX}{namespace}/")
    except (TemporaryError, PermanentError, TimeoutError):
        return ""
    finally:
        await store.close()
    found = []
    for item in items:
        try:
            found.append(Instance.from_json(item.value))
        except ValueError:
            continue
    names = [f"{each.worker} (pid {each.pid})" for each in unmanaged(found)]
    return f"Left running, because serve has not started them: {', '.join(names)}." if names else ""


IN_FLIGHT_POLL_S = 0.5
"""Seconds between two looks."""

IN_FLIGHT_LINE_S = 5.0
"""Seconds between two lines where there is no terminal."""

_IN_FLIGHT = re.compile(rb"^dynamo_component_inflight_requests\{[^}]*\} ([0-9.e+]+)$", re.M)


class StandardError(io.TextIOBase):
    """Standard error, which drops a text that nobody reads: the end of ``serve`` does not wait for it."""

    def isatty(self) -> bool:
        return os.isatty(2)

    def write(self, text: str) -> int:
        """Write the text if it is taken at once, else drop it; return its length."""
        try_write(text, 2)
        return len(text)


async def show_drain(urls: Sequence[str], timeout_s: float, line: ProgressLine | None = None) -> None:
    """Show the number of requests in flight, and the time left, until cancelled.

    ``urls`` are the addresses of the processes that take requests, ``timeout_s`` the time until the drain's
    deadline. Shows nothing while no request is in flight.
    """
    deadline_s = time.monotonic() + timeout_s
    with line or ProgressLine(StandardError(), IN_FLIGHT_LINE_S) as shown:
        while True:
            requests = await requests_in_flight(urls)
            if requests:
                left = clock(deadline_s - time.monotonic())
                noun = "request" if requests == 1 else "requests"
                shown.show(f"{requests} {noun} in flight, at most {left} left")
            await asyncio.sleep(IN_FLIGHT_POLL_S)


async def requests_in_flight(urls: Sequence[str]) -> int:
    """Return the requests that these processes have accepted and not answered, by their ``/metrics``."""
    asked = (try_get(f"{url}/metrics", timeout_s=IN_FLIGHT_POLL_S) for url in urls)
    said = (answer.body for answer in await asyncio.gather(*asked) if answer)
    return sum(int(float(found[1])) for text in said if (found := _IN_FLIGHT.search(text)))
