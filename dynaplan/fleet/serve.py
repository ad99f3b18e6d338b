"""``dynaplan serve``: one process that runs the circus arbiter until it is asked to stop.

``Serving.run`` is its life: the arbiter starts, the user reads the banner and when the deployment is ready
(``readiness.py``), the watchdog checks every two seconds (``watchdog.py``), a signal or ``circusctl quit``
asks for the end, and everything is drained and ended (``shutdown.py``).
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

import click
import zmq

from dynaplan.config.settings.servers import describe_other_store
from dynaplan.contract.page_access import PAGE_PATH, page_url
from dynaplan.fleet.arbiter import ServeArbiter
from dynaplan.fleet.gpu_inventory import shows_gpus
from dynaplan.fleet.launch import Launch
from dynaplan.fleet.preparation import Config, Preparation, ServeOptions, prepare
from dynaplan.fleet.prometheus_targets import prometheus_targets
from dynaplan.fleet.readiness import Readiness, RecordedWorkers
from dynaplan.fleet.reattach.adopting import adopt_deployment, save_handover
from dynaplan.fleet.reattach.versions import SUCCESSOR_FILE, write_own
from dynaplan.fleet.sd_notify import READY, STOPPING, ServiceManager
from dynaplan.fleet.shutdown import Shutdown, StopRequest, drain
from dynaplan.fleet.watchdog import (
    CHECK_EVERY_S,
    Check,
    DirectoryWatch,
    FailureWatch,
    PluginWatchdog,
    server_watches,
    watching,
)
from dynaplan.fleet.watchers import embedded_watcher, listening_services, plugin_watcher, worker_watcher
from dynaplan.graph.lifecycle import EXIT_CANNOT_START, Role
from dynaplan.graph.model import GraphSpec
from dynaplan.process import process_table
from dynaplan.process.heartbeats import SERVE_HEARTBEAT, HeartbeatFiles
from dynaplan.process.kernel import adopt_orphans
from dynaplan.process.signals import Interruption
from dynaplan.process.supervisor_link import SupervisorLink
from dynaplan.util import screen, terminal
from dynaplan.util.clock import SystemClock
from dynaplan.util.descriptors import raise_descriptor_limit
from dynaplan.util.errors import ConfigError

__all__ = ["ServeOptions", "serve"]

EXIT_FORCED = 130

SERVE_STILL_S = 60.0
"""Time without a heartbeat after which the supervisor kills this process: its children go on running."""


def serve(graph: GraphSpec, config: Config, options: ServeOptions, link: SupervisorLink | None = None) -> int:
    """Run the graph until SIGINT, SIGTERM or ``circusctl quit``; return the exit code, 130 when asked twice.

    With ``exit_on_failure`` the exit code is 78 when no worker of a service can ever start. ``link`` leads to
    the supervisor. Raises a UserError, and has started nothing, when something is in the way.
    """
    interruption = _begin()
    service_manager = ServiceManager.from_environ(os.environ)
    with ExitStack() as stack:
        try:
            prepared = prepare(graph, config, options, stack, link)
            save_handover(prepared, options.exit_on_failure)
            interruption.leave_to_check()
            return asyncio.run(
                Serving(prepared, interruption, options.exit_on_failure, service_manager).run()
            )
        finally:
            _clear_up_in_peace()


def serve_on(link: SupervisorLink) -> int | None:
    """Adopt the deployment that a killed ``serve`` has left, and go on with it; None when there is none."""
    interruption = _begin()
    environment, serving, stack = dict(os.environ), None, ExitStack()
    try:
        found = adopt_deployment(link, stack)
        if found is None:
            return None
        interruption.leave_to_check()
        serving = Serving(found[0], interruption, found[1], ServiceManager.from_environ(environment))
        return asyncio.run(serving.run())
    finally:
        # Else the deployment goes on, and the supervisor starts another process.
        if serving and serving.is_here:
            _clear_up_in_peace()
            stack.close()


def _begin() -> Interruption:
    raise_descriptor_limit()
    sys.stdout.flush()
    # Until Serving takes the signals, SIGTERM too gives back what was taken; a closed terminal ends nothing.
    interruption = Interruption()
    interruption.handle_signals()
    signal.signal(signal.SIGHUP, lambda number, frame: None)
    return interruption


def _clear_up_in_peace() -> None:
    """Ignore signals while everything is released."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


class Serving:
    """The arbiter from its start to its end."""

    def __init__(
        self,
        prepared: Preparation,
        interruption: Interruption,
        exits_on_failure: bool = False,
        service_manager: ServiceManager | None = None,
    ) -> None:
        self._prepared = prepared
        self._interruption = interruption
        self._service_manager = service_manager or ServiceManager()
        self._launch = prepared.launch
        self._heartbeats = HeartbeatFiles.of(prepared.launch.runtime_dir)
        self._stop = StopRequest(self._report_stop)
        self._exits_on_failure = exits_on_failure
        self._has_failed = False
        self.is_here = False

    async def run(self) -> int:
        """Start everything, wait for the request to stop, end everything; return the exit code."""
        begun_s = time.monotonic()
        self._stop.handle_signals()
        self._interruption.check()
        adopt_orphans()
        workers = RecordedWorkers(self._launch.statefile)
        arbiter = self._arbiter()
        self._greet()
        shutdown = self._shutdown(arbiter)
        await self._start(arbiter)
        gc.freeze()  # what was imported stays
        gc.enable()
        # Not before: a supervisor that has not heard of this process ends everything at Ctrl-C without it.
        ready = asyncio.create_task(self._report_ready(begun_s, workers), name="readiness")
        try:
            async with watching(self._checks(arbiter, workers), SystemClock()):
                with prometheus_targets(self._launch.log_dir, self._launch.frontend_url):
                    await self._stop.requested.wait()
            async with watching([self._beat], SystemClock()):  # requests may take minutes to finish
                await drain(shutdown, self._launch, workers.read())
        finally:
            ready.cancel()
        report("Stopped.")
        if self._stop.is_hurried:
            return EXIT_FORCED
        return EXIT_CANNOT_START if self._has_failed else 0

    # -- start -----------------------------------------------------------------------------------

    def _arbiter(self) -> ServeArbiter:
        launch, prepared = self._launch, self._prepared
        specs = [
            *(embedded_watcher(launch, server) for server in prepared.servers),
            *(worker_watcher(launch, worker) for worker in prepared.workers),
        ]
        return ServeArbiter(
            specs,
            launch.circus_endpoint,
            launch.circus_events,
            plugin_watcher(launch),
            str(launch.circus_log),
            self._on_quit,
            prepared.public_socket,
            listening_services(launch.graph),
            prepared.supervised_fleet,
        )

    def _greet(self) -> None:
        for note in self._prepared.notes:
            report(note)
        if not (
            self._prepared.supervised_fleet and self._prepared.supervised_fleet.adoptable
        ):  # the user has seen it
            secret = os.environ.get("DYNAPLAN_WORKER_TOKEN", "")
            page = page_line(self._launch, secret, is_private=sys.stdout.isatty())
            report(banner(self._launch, self._prepared.is_simulated, describe_other_store(os.environ), page))

    async def _start(self, arbiter: ServeArbiter) -> None:
        try:
            await arbiter.start()
        except zmq.ZMQError as error:
            endpoints = f"{self._launch.circus_endpoint} and {self._launch.circus_events}"
            raise ConfigError(
                f"circus cannot listen on {endpoints}: {error}",
                hint="DYN_CIRCUS_ENDPOINT_PORT and DYN_CIRCUS_PUBSUB_PORT expect free ports.",
            ) from error
        arbiter.reap_on_sigchld()
        link = self._prepared.supervised_fleet.link if self._prepared.supervised_fleet else None
        if link:
            heartbeat = self._heartbeats.path(SERVE_HEARTBEAT)
            link.confirm_running(self._launch.runtime_dir / SUCCESSOR_FILE, heartbeat, SERVE_STILL_S)
        with suppress(OSError):  # a full disk: an upgrade then says that it does not know this version
            write_own(self._launch.runtime_dir, link.arguments if link else ())
        self.is_here = True

    async def _report_ready(self, begun_s: float, workers: RecordedWorkers) -> None:
        readiness = Readiness(self._launch, self._prepared.servers, workers)
        await readiness.wait(report)
        url = self._launch.frontend_url
        report(screen.good(f"Ready after {time.monotonic() - begun_s:.1f} s: {url}"))
        self._service_manager.notify(READY, f"serves at {url}")
        await readiness.wait_for_rest(report, begun_s)

    # -- watch -----------------------------------------------------------------------------------

    async def _beat(self) -> None:
        self._heartbeats.beat(SERVE_HEARTBEAT, CHECK_EVERY_S)

    def _checks(self, arbiter: ServeArbiter, workers: RecordedWorkers) -> Sequence[Check]:
        launch, servers, clock = self._launch, self._prepared.servers, SystemClock()
        plugin = PluginWatchdog(arbiter, launch.plugin_name, self._heartbeats, process_table, clock, report)
        return [
            self._beat,
            plugin.check,
            DirectoryWatch(launch, servers, arbiter, report).check,
            FailureWatch(workers, launch.log_dir, report, self._end_by_failure).check,
            *(server.check for server in server_watches(launch, servers, arbiter, report)),
            self._service_manager.notify_alive,
        ]

    def _end_by_failure(self) -> None:
        """End in order with exit code 78, if the user has asked for that."""
        if self._exits_on_failure and not self._stop.requested.is_set():
            self._has_failed = True
            self._stop.request()

    # -- end -------------------------------------------------------------------------------------

    def _shutdown(self, arbiter: ServeArbiter) -> Shutdown:
        return Shutdown(
            arbiter,
            self._launch.graph,
            self._launch.plugin_name,
            process_table,
            self._launch.drain_timeout_s,
            report,
            self._prepared.public_socket,
            self._prepared.supervised_fleet.link if self._prepared.supervised_fleet else None,
            is_hurried=self._stop.hurried,
        )

    def _report_stop(self) -> None:
        patience = f"requests may take {self._launch.drain_timeout_s:g} s to finish"
        report(f"Stopping: {patience}. Once more to stop at once.")
        self._service_manager.notify(STOPPING)

    async def _on_quit(self) -> None:
        if not self._stop.requested.is_set():
            self._stop.request()


def report(line: str) -> None:
    """Print a line for the user; a terminal that is gone, or that nobody reads, holds up nothing."""
    wanted = screen.colours_wanted()
    terminal.try_write_line(
        line if wanted or (wanted is None and sys.stdout.isatty()) else click.unstyle(line)
    )


def banner(launch: Launch, is_simulated: bool, store: str = "", page: str = "") -> str:
    """Return the addresses and directories, the circusctl line, and one request to try.

    ``store`` is where the key-value store is; empty for the usual one, which is not named. ``page`` is where
    the web page is; empty where there is none.
    """
    kind = "simulated GPUs" if is_simulated else "GPUs"
    asked = [(service.name, service.gpus) for service in launch.graph.services]
    has_gpus = shows_gpus(launch.gpus, asked, launch.config)
    gpus = f", {len(launch.gpus)} {kind}" if has_gpus else ""
    frontend = launch.graph.of_role(Role.FRONTEND)
    rows = [
        ("graph", f"{launch.graph.identifier}, namespace {launch.namespace}{gpus}"),
        ("URL", launch.frontend_url),
        *([("page", page)] if page else []),
        ("logs", str(launch.log_dir)),
        ("statefile", str(launch.statefile)),
    ]
    if store:
        rows.append(("store", store))
    if launch.graph.of_role(Role.PLANNER):
        rows.append(("TensorBoard", f"tensorboard --logdir {tensorboard_dir(launch)}"))
    rows.append(("circus", f"circusctl --endpoint {launch.circus_endpoint} status"))
    if frontend:
        rows.append(("try", curl(launch)))
    else:
        rows += [("try", line) for line in own_curls(launch)]
    return "\n".join(["dynaplan serve (Ctrl-C to stop)", *(f"  {name:<12} {text}" for name, text in rows)])


def page_line(launch: Launch, secret: str, *, is_private: bool) -> str:
    """Return the address of the web page; empty when no Frontend has it.

    The address holds the page's token (``secret``). So it is returned only where the output ``is_private``, a
    terminal's; otherwise, as for a file that others may read, the command that prints the address.
    """
    frontend = launch.graph.of_role(Role.FRONTEND)
    if not frontend or not secret or not launch.settings_of(frontend.name).get("page", True):
        return ""
    if is_private:
        return page_url(launch.frontend_url, secret)
    return (
        f"`dynaplan ui --namespace {launch.namespace}` prints the address of {launch.frontend_url}{PAGE_PATH}"
    )


def tensorboard_dir(launch: Launch) -> str:
    """Return the directory of the planner's curves."""
    return str(launch.config.get("Planner", {}).get("log-dir") or launch.log_dir / "planner")


def curl(launch: Launch) -> str:
    body: dict[str, Any] = {"model": model_name(launch.config), "stream": True, "max_tokens": 32}
    body["messages"] = [{"role": "user", "content": "Why is the sky blue?"}]
    url = f"{launch.frontend_url}/v1/chat/completions"
    data = shlex.quote(json.dumps(body))
    return f"{_curl(launch)} {url}{_key(launch)} -H 'Content-Type: application/json' -d {data}"


def own_curls(launch: Launch) -> list[str]:
    """A request for each endpoint that the graph's own services offer to users.

    Its body is empty: an endpoint that needs fields answers with their names.
    """
    names = [name for service in launch.graph.services for name in service.public_endpoints]
    header = " -H 'Content-Type: application/json'" + _key(launch)
    return [f"{_curl(launch)} {launch.frontend_url}/{name}{header} -d '{{}}'" for name in names]


def _curl(launch: Launch) -> str:
    """Return the command: the certificate of the Frontend is hardly one for an address of this machine."""
    return "curl -kN" if launch.is_tls else "curl -N"


def _key(launch: Launch) -> str:
    """Return curl's option with a key, as a variable of the shell; empty where the Frontend asks for none.

    ``DYNAPLAN_API_KEY`` is the owner's key, ``OPENAI_API_KEY`` one of the file ``api-keys``.
    """
    frontend = launch.graph.of_role(Role.FRONTEND)
    has_file = frontend and launch.settings_of(frontend.name).get("api-keys")
    if not (launch.is_protected or has_file):
        return ""
    return f' -H "Authorization: Bearer ${"DYNAPLAN_API_KEY" if launch.is_protected else "OPENAI_API_KEY"}"'


def model_name(config: dict[str, dict[str, Any]]) -> str:
    """The model as the configuration names it; a placeholder when it does not."""
    sections = [config.get("Frontend", {}), config.get("Common", {}), *config.values()]
    for key in ("served_model_name", "served-model-name", "model"):
        for section in sections:
            if isinstance(section.get(key), str):
                return str(section[key])
    return "MODEL"
