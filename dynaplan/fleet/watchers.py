"""Watchers: a worker's or a server's command for circus. Pure: the same for ``serve`` and the fleet plugin.

One watcher per worker, one process per watcher. circus never restarts it (``respawn`` false) and never
signals the children of its process: restarting and ending workers is the fleet plugin's work.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dynaplan.config.service_config import CONFIG_VARIABLE
from dynaplan.fleet import PLUGIN_PROGRAM, WORKER_PROGRAM
from dynaplan.fleet.launch import Launch
from dynaplan.fleet.rules.allocation import worker_environment
from dynaplan.fleet.servers import ServerSpec
from dynaplan.graph.lifecycle import Role, Worker
from dynaplan.graph.model import GraphSpec
from dynaplan.models.gpu_words import MASK, chosen_gpus
from dynaplan.process.guard import guard_command


@dataclass(frozen=True)
class WatcherSpec:
    """A watcher for circus; ``env`` in ``options`` holds what differs from the environment of ``serve``."""

    name: str
    cmd: str
    args: list[str]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def command_line(self) -> str:
        return shlex.join([*shlex.split(self.cmd), *self.args])


def worker_watcher(launch: Launch, worker: Worker) -> WatcherSpec:
    """The watcher of one worker, with its own GPUs in its environment."""
    service = launch.graph.service(worker.component)
    args = [*WORKER_PROGRAM[1:], launch.graph.identifier]
    args += ["--service-name", worker.component, "--worker-id", "1"]
    envs, visible = service.envs if service else {}, tuple[int, ...]()
    if service and service.model:
        visible = chosen_gpus(launch.settings_of(worker.component), envs, launch.gpus).visible
    elif worker.gpus:  # those of a graph's workers are chosen without their owner's mask
        envs = {name: value for name, value in envs.items() if name != MASK}
    options = {
        **_common(launch.drain_timeout_s),
        "respawn": False,
        "working_dir": launch.graph.working_dir,
        "env": {
            **worker_environment(worker, launch.gpus, envs, visible),
            **({CONFIG_VARIABLE: json.dumps(launch.config)} if launch.is_reloaded else {}),
        },
    }
    return WatcherSpec(worker.name, shlex.quote(WORKER_PROGRAM[0]), args, options)


def service_of(args: Sequence[str] | None) -> str:
    """The service whose worker these arguments start; empty for an embedded server or the fleet plugin."""
    named = list(args or ())
    return named[named.index("--service-name") + 1] if "--service-name" in named else ""


def listening_services(graph: GraphSpec) -> frozenset[str]:
    """Return the services whose workers may listen on the public port."""
    listening = (Role.FRONTEND, Role.SERVICE)
    return frozenset(service.name for service in graph.services if service.role in listening)


def services_stopped_first(graph: GraphSpec) -> set[str]:
    """Return the planner and every service that takes clients' requests: stopped before the workers."""
    named = {each.name for each in graph.services if each.role in (Role.PLANNER, Role.FRONTEND)}
    return {graph.services[0].name, *named}


ONE_THREAD = {"GOMAXPROCS": "1"}
"""etcd and nats-server are Go programs: with one running thread each idles at two thirds of the cost."""


def embedded_watcher(launch: Launch, server: ServerSpec) -> WatcherSpec:
    """The watcher of an embedded server, which circus restarts by itself; its output goes to its log."""
    name = f"{launch.namespace}_{server.name}"
    log_file = launch.log_dir / f"{name}.log"
    command = guard_command(server.cmd, launch.arbiter.pid, log=log_file, without=server.without)
    options = {**_common(1.0), "respawn": True, "working_dir": str(server.working_dir), "env": ONE_THREAD}
    return WatcherSpec(name, shlex.quote(command[0]), command[1:], options)


PLUGIN_CLASS = "dynaplan.fleet_plugin.FleetPlugin"
"""By its name, as the flat below ``planner`` may not import it."""


def plugin_watcher(launch: Launch) -> WatcherSpec:
    """The watcher of the fleet plugin, started last, as no request waits for it.

    It is not one of circus' own plugins: circus would import it in the process of ``serve``.
    """
    args = [*PLUGIN_PROGRAM[1:], "--endpoint", launch.circus_endpoint, "--pubsub", launch.circus_events]
    args += ["--log-level", "warning", "--log-output", str(launch.circus_log), PLUGIN_CLASS]
    options = {**_common(launch.drain_timeout_s), "respawn": True, "priority": -1}
    return WatcherSpec(launch.plugin_name, shlex.quote(PLUGIN_PROGRAM[0]), args, options)


def _common(graceful_timeout_s: float) -> dict[str, Any]:
    return {
        "numprocesses": 1,
        "copy_env": True,
        "stop_children": False,
        "stop_signal": 15,
        "graceful_timeout": graceful_timeout_s,
        "max_retry": 1,
    }
