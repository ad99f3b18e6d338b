"""``dynaplan serve``: one process that runs the circus arbiter until it is told to stop."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import click
import zmq

from dynaplan.config.service_config import section_options
from dynaplan.config.settings.servers import describe_other_store
from dynaplan.fleet import gpu_stock, local_host
from dynaplan.fleet.arbiter import ServeArbiter
from dynaplan.fleet.banner import banner, page_line
from dynaplan.fleet.plugin.gpu_claims import GpuClaims
from dynaplan.fleet.preparation import Config, Preparation, ServeOptions, prepare
from dynaplan.fleet.reattach.adopting import adopted, leave_to_the_next
from dynaplan.fleet.reattach.making_way import ANSWERED_S, end_for_another, make_way
from dynaplan.fleet.reattach.versions import write_own
from dynaplan.fleet.rules import allocation
from dynaplan.fleet.rules.statefile import fleet_of
from dynaplan.fleet.shutdown import Shutdown
from dynaplan.fleet.upkeep.directory_watch import DirectoryWatch
from dynaplan.fleet.upkeep.drain_display import show_drain
from dynaplan.fleet.upkeep.failure_watch import FailureWatch
from dynaplan.fleet.upkeep.prometheus_targets import told_to_prometheus
from dynaplan.fleet.upkeep.server_watch import server_watches
from dynaplan.fleet.upkeep.service_notices import READY, STOPPING, ServiceNotices
from dynaplan.fleet.upkeep.unmanaged import staying
from dynaplan.fleet.upkeep.watchdog import PluginWatch, Vigil
from dynaplan.fleet.watchers import WatcherSpec, listening_services, server_watcher, worker_watcher
from dynaplan.graph.lifecycle import EXIT_NEVER, Role, Worker, WorkerState
from dynaplan.graph.model import GraphSpec
from dynaplan.process import process_table
from dynaplan.process.holding import HolderLink
from dynaplan.process.parent_death import adopt_orphans, guarded
from dynaplan.process.signals import Interruption
from dynaplan.util import screen, terminal
from dynaplan.util.clock import SystemClock
from dynaplan.util.descriptors import raise_descriptor_limit
from dynaplan.util.errors import ConfigError, StatefileCorrupt
from dynaplan.util.probe import health_answer

__all__ = ["ServeOptions", "gpu_map", "serve"]

EXIT_HURRIED = 130
READY_POLL_S = 0.05
HEALTH_ANSWER_S = 1.0
SLOW_S = 10.0
"""Time after which the user is told which workers and servers are not ready yet, in seconds."""


def serve(graph: GraphSpec, config: Config, options: ServeOptions, link: HolderLink | None = None) -> int:
    """Run the graph until SIGINT, SIGTERM or ``circusctl quit``; return the exit code, 130 when told twice.

    78, with ``exit_on_failure``, when no worker of a service can ever start. ``link`` leads to the holder.
    Raises a UserError, and has started nothing, when something is in the way.
    """
    interruption = _begin()
    notices = ServiceNotices.taken_from(os.environ)
    with ExitStack() as stack:
        try:
            prepared = prepare(graph, config, options, stack, link)
            leave_to_the_next(prepared, options.exit_on_failure)
            interruption.leave_to_check()
            return asyncio.run(Serving(prepared, interruption, options.exit_on_failure, notices).run())
        finally:
            _clear_up_in_peace()


def serve_on(link: HolderLink) -> int | None:
    """Go on with the deployment below the holder, as ``serve`` does; None when there is none."""
    interruption = _begin()
    environment, serving, stack = dict(os.environ), None, ExitStack()
    try:
        found = adopted(link, stack)
        if found is None:
            return None
        interruption.leave_to_check()
        serving = Serving(found[0], interruption, found[1], ServiceNotices.taken_from(environment))
        return asyncio.run(serving.run())
    finally:
        if serving and serving.is_here:  # else the deployment goes on, and the holder starts another process
            _clear_up_in_peace()
            stack.close()


def _begin() -> Interruption:
    """Do what comes first in this process."""
    raise_descriptor_limit()
    sys.stdout.flush()
    # Until Serving takes the signals, SIGTERM too gives back what was taken; a closed terminal ends nothing.
    interruption = Interruption()
    interruption.handle_signals()
    signal.signal(signal.SIGHUP, lambda number, frame: None)
    return interruption


def _clear_up_in_peace() -> None:
    """Ignore signals while everything is given back."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def gpu_map(graph: GraphSpec, config: Config, gpus: int | None, use_busy_gpus: bool = False) -> str:
    """Return tables of the workers and the GPUs, for ``--dry-run``; CapacityError when they do not fit."""
    inventory, _ = local_host.gpu_inventory(gpus)
    arbiter = process_table.identity_of(os.getpid())
    foreign = GpuClaims(local_host.gpu_claims(arbiter, graph.namespace), inventory).foreign()
    busy = gpu_stock.in_use(inventory, foreign)
    notes = gpu_stock.notes(inventory, foreign, busy, use_busy_gpus)
    unusable = foreign if use_busy_gpus else {**busy, **foreign}
    allocation.check_fits(graph, inventory, unusable)
    named = {each.name: section_options(config, each.name).get("model") for each in graph.services}
    models = {
        name: Path(model).name if Path(model).is_absolute() else model
        for name, model in named.items()
        if isinstance(model, str)
    }
    tables = allocation.gpu_map(graph, inventory, unusable, models)
    return "\n\n".join(["\n".join(notes), tables] if notes else [tables])


class Serving:
    """The arbiter from its start to its end."""

    def __init__(
        self,
        prepared: Preparation,
        interruption: Interruption,
        exits_on_failure: bool = False,
        notices: ServiceNotices | None = None,
    ) -> None:
        self._prepared = prepared
        self._interruption = interruption
        self._notices = notices or ServiceNotices()
        self._launch = prepared.launch
        self._told_to_stop = asyncio.Event()
        self._shutdown: Shutdown | None = None
        self._is_hurried = False
        self._exits_on_failure = exits_on_failure
        self._has_failed = False
        self.is_here = False
        self._seen: tuple[tuple[int, int], tuple[Worker, ...]] = (0, 0), ()

    async def run(self) -> int:
        """Start everything, tell the user, wait, end everything; return the exit code."""
        begun_s = time.monotonic()
        self._handle_signals()
        self._interruption.check()
        adopt_orphans()
        arbiter = self._arbiter()
        for note in self._prepared.notes:
            say(note)
        if not (self._prepared.held and self._prepared.held.adoptable):  # the user has seen it
            secret = os.environ.get("DYNAPLAN_WORKER_TOKEN", "")
            page = page_line(self._launch, secret, is_private=sys.stdout.isatty())
            say(banner(self._launch, self._prepared.is_simulated, describe_other_store(os.environ), page))
        shutdown = self._shutdown = Shutdown(
            arbiter,
            self._launch.graph,
            self._launch.plugin_name,
            process_table,
            self._launch.drain_timeout_s,
            say,
            self._prepared.public_socket,
            self._prepared.held.link if self._prepared.held else None,
        )
        ready = asyncio.create_task(self._say_when_ready(begun_s))
        try:
            await self._start(arbiter)
            vigil = asyncio.create_task(self._vigil(arbiter).keep(), name="vigil")
            try:
                with told_to_prometheus(self._launch.log_dir, self._launch.frontend_url):
                    await self._told_to_stop.wait()
            finally:
                vigil.cancel()
            await self._drained(shutdown)
        finally:
            ready.cancel()
        say("Stopped.")
        if self._is_hurried:
            return EXIT_HURRIED
        return EXIT_NEVER if self._has_failed else 0

    async def _drained(self, shutdown: Shutdown) -> None:
        """End everything, and show the requests in flight meanwhile."""
        stays = asyncio.create_task(staying(self._launch.namespace), name="who stays")
        try:
            workers = self._workers()
        except StatefileCorrupt:
            workers = ()
        takers = shutdown.first_services()
        urls = [each.url for each in workers if each.component in takers and each.url]
        display = asyncio.create_task(show_drain(urls, self._launch.drain_timeout_s), name="drain display")
        try:
            await shutdown.run(stays)
        finally:
            stays.cancel()
            display.cancel()
            await asyncio.wait({stays, display})
        if not stays.cancelled() and stays.result():
            say(stays.result())

    async def _start(self, arbiter: ServeArbiter) -> None:
        try:
            await arbiter.start()
        except zmq.ZMQError as error:
            endpoints = f"{self._launch.circus_endpoint} and {self._launch.circus_events}"
            raise ConfigError(
                f"circus cannot listen on {endpoints}: {error}",
                hint="DYN_CIRCUS_ENDPOINT_PORT and DYN_CIRCUS_PUBSUB_PORT expect free ports.",
            ) from error
        arbiter.notice_ends_at_once()
        if self._prepared.held:
            self._prepared.held.link.tell_here()
        with suppress(OSError):  # a full disk: an upgrade then says that it does not know this version
            write_own(self._launch.runtime_dir)
        self.is_here = True

    def _vigil(self, arbiter: ServeArbiter) -> Vigil:
        clock, heartbeats = SystemClock(), local_host.heartbeats(self._launch.runtime_dir)
        plugin = PluginWatch(arbiter, self._launch.plugin_name, heartbeats, process_table, clock, say)
        directories = DirectoryWatch(self._launch, self._prepared.servers, arbiter, say)
        failures = FailureWatch(self._workers, self._launch.log_dir, say, self._end_by_failure)
        servers = server_watches(self._launch, self._prepared.servers, arbiter, say)
        tasks = [
            plugin.look,
            directories.look,
            failures.look,
            *(server.look for server in servers),
            self._notices.alive,
        ]
        return Vigil(tasks, clock)

    def _end_by_failure(self) -> None:
        """End in order with exit code 78, if the user has asked for that."""
        if self._exits_on_failure and not self._told_to_stop.is_set():
            self._has_failed = True
            self._stop()

    def _arbiter(self) -> ServeArbiter:
        launch = self._launch
        specs = [
            *(
                self._server(server.name, server.cmd, str(server.working_dir), server.without)
                for server in self._prepared.servers
            ),
            *(worker_watcher(launch, worker) for worker in self._prepared.workers),
        ]
        plugin = {
            "use": "dynaplan.fleet.plugin.plugin.FleetPlugin",
            "name": launch.plugin_name,
            "close_child_stdout": False,
            "close_child_stderr": False,
        }
        log_file = str(launch.log_dir / "circus.log")
        return ServeArbiter(
            specs,
            launch.circus_endpoint,
            launch.circus_events,
            plugin,
            log_file,
            self._on_quit,
            self._prepared.public_socket,
            listening_services(launch.graph),
            self._prepared.held,
            self._make_way,
        )

    def _make_way(self, properties: Mapping[str, Any]) -> str:
        """End for another version, unless something speaks against it; return that."""
        link = self._prepared.held.link if self._prepared.held else None
        if not self.is_here or self._told_to_stop.is_set():
            return "serve is starting or stopping"
        arguments = link.arguments if link else ()
        refusal = make_way(link, arguments, os.environ.get("DYNAPLAN_WORKER_TOKEN", ""), properties)
        if not refusal:
            asyncio.get_running_loop().call_later(ANSWERED_S, end_for_another)
        return refusal

    def _server(
        self, name: str, command: list[str], working_dir: str, without: tuple[str, ...]
    ) -> WatcherSpec:
        log_file = self._launch.log_dir / f"{self._launch.namespace}_{name}.log"
        command = guarded(command, self._launch.arbiter.pid, log=log_file, without=without)
        return server_watcher(f"{self._launch.namespace}_{name}", command, working_dir)

    def _handle_signals(self) -> None:
        """Handle SIGINT and SIGTERM: the first ends in order, the second at once.

        Not by the loop's own handlers, which it takes away when it closes: what was taken is given back after
        that, and a signal in between would end the process in the midst of it.
        """
        loop = asyncio.get_running_loop()

        def stop(number: int, frame: FrameType | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._stop)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)

    def _stop(self) -> None:
        if not self._told_to_stop.is_set():
            patience = f"requests may take {self._launch.drain_timeout_s:g} s to finish"
            say(f"Stopping: {patience}. Once more to stop at once.")
            self._notices.tell(STOPPING)
            self._told_to_stop.set()
        elif self._shutdown:
            self._is_hurried = True
            self._shutdown.is_hurried.set()

    async def _on_quit(self) -> None:
        if not self._told_to_stop.is_set():
            self._stop()

    async def _say_when_ready(self, begun_s: float) -> None:
        has_frontend = self._launch.graph.of_role(Role.FRONTEND) is not None
        tell_at_s = begun_s + SLOW_S
        while not await (self._frontend_is_healthy() if has_frontend else self._all_are_ready()):
            await asyncio.sleep(READY_POLL_S)
            if time.monotonic() > tell_at_s:
                tell_at_s = math.inf
                missing = ", ".join(await self._missing())
                say(screen.warning(f"Not ready after {SLOW_S:g} s; waiting for: {missing}"))
        say(screen.good(f"Ready after {time.monotonic() - begun_s:.1f} s: {self._launch.frontend_url}"))
        self._notices.tell(READY, f"serves at {self._launch.frontend_url}")

    async def _frontend_is_healthy(self) -> bool:
        status, _, _ = (await health_answer(self._launch.frontend_url, HEALTH_ANSWER_S)).partition(b"\r\n")
        return b" 200 " in status

    async def _all_are_ready(self) -> bool:
        states = {worker.state for worker in self._workers()}
        return states == {WorkerState.READY}

    def _workers(self) -> tuple[Worker, ...]:
        """Return the workers as the fleet plugin has written them down."""
        path = self._launch.statefile
        try:
            status = path.stat()
            mark = (status.st_ino, status.st_mtime_ns)  # a new file with each change
            if mark != self._seen[0]:
                document = local_host.open_statefile(path).read()
                self._seen = mark, fleet_of(document) if document else ()
        except (OSError, StatefileCorrupt):
            return ()  # the fleet plugin writes it anew at its next change
        return self._seen[1]

    async def _missing(self) -> list[str]:
        """Return the servers and workers that are not ready yet, in words."""
        silent = [server.name for server in self._prepared.servers if not await server.is_ready()]
        late = [
            f"{each.name} ({each.state.value})"
            for each in self._workers()
            if each.state is not WorkerState.READY
        ]
        return [*silent, *late] or ["the Frontend"]


def say(line: str) -> None:
    """Print a line for the user; a terminal that is gone, or that nobody reads, holds up nothing."""
    wanted = screen.colours_wanted()
    terminal.say(line if wanted or (wanted is None and sys.stdout.isatty()) else click.unstyle(line))
