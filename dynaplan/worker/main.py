"""One worker process: ``python -m dynaplan.worker.main GRAPH --service-name S --worker-id 1``.

Exit codes: 0 drained, 75 drained but the deadline cut requests off, 78 can never start, 76 its command
ended by itself before it answered, 1 crashed, or cannot start now (no port is free, for one).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynaplan.config import certificates
from dynaplan.config.overrides import MODELS
from dynaplan.config.service_config import ServiceConfig, section_options
from dynaplan.config.settings.frontend import FrontendSettings
from dynaplan.config.settings.servers import lease_ttl_s
from dynaplan.config.settings.worker import ProcessSettings
from dynaplan.events import event_connections
from dynaplan.graph.lifecycle import EXIT_CANNOT_START, EXIT_PROGRAM_ENDED, Role
from dynaplan.process import process_table
from dynaplan.process.kernel import die_with_parent
from dynaplan.process.logfile import LogFile, configure_logging
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import (
    ConfigError,
    DeploymentError,
    ProgramEnded,
    TemporaryError,
    UserError,
    WorkerStartFailed,
)
from dynaplan.util.sockets import bound_socket, socket_of_stdin
from dynaplan.worker.timing import CLAIMS_POLL_S, CLOSE_TIMEOUT_S

if TYPE_CHECKING:
    import socket

    from dynaplan.graph.service import Service
    from dynaplan.http.tls import ServerTls
    from dynaplan.store.port import Store
    from dynaplan.worker.server import WorkerServer
    from dynaplan.worker.worker_runtime import WorkerRuntime


@dataclass(frozen=True)
class WorkerEnvironment:
    """The settings that a worker process finds in its environment."""

    namespace: str
    worker_name: str
    worker_token: str
    runtime_dir: str
    log_dir: str
    parent_pid: int
    host: str
    port: int
    api_key: str
    drain_deadline_s: float
    gpus: float
    scratch_dir: str
    lease_ttl_s: int
    memory_fraction: float = 0.0

    @classmethod
    def read(cls, environment: Mapping[str, str], service_name: str) -> WorkerEnvironment:
        """Read the variables; raises ConfigError for one that should be a number and is none."""
        namespace = environment.get("DYN_NAMESPACE", "dynamo")
        return cls(
            namespace=namespace,
            worker_name=environment.get("DYNAPLAN_WORKER_NAME") or f"{namespace}_{service_name}",
            worker_token=environment.get("DYNAPLAN_WORKER_TOKEN", ""),
            runtime_dir=environment.get("DYNAPLAN_RUNTIME_DIR", ""),
            log_dir=environment.get("DYNAPLAN_LOG_DIR", ""),
            parent_pid=int(_number(environment, "DYNAPLAN_PARENT_PID", 0)),
            host=environment.get("DYNAMO_HOST", FrontendSettings.host),
            port=int(_number(environment, "DYNAMO_PORT", FrontendSettings.port)),
            api_key=environment.get("DYNAPLAN_API_KEY", ""),
            drain_deadline_s=_number(
                environment, "DYNAPLAN_DRAIN_DEADLINE_S", ProcessSettings.drain_deadline_s
            ),
            gpus=_number(environment, "DYNAPLAN_GPUS", 0),
            scratch_dir=environment.get("DYNAPLAN_SCRATCH_DIR", ""),
            lease_ttl_s=lease_ttl_s(environment),
            memory_fraction=_number(environment, "DYNAPLAN_MEMORY_FRACTION", 0),
        )


@dataclass(frozen=True)
class Standalone:
    """A process that no ``serve`` has started: in the foreground of a terminal, and unmanaged.

    ``public_socket`` is bound to the public port, for a service that listens on it; ``gpus`` are the indices
    of the GPUs that it has claimed for itself. ``internal_socket`` is bound to an address that other hosts
    reach, and ``advertised`` is the name by which they do; without it the worker listens on loopback.
    ``renew_claims`` makes the claims on the GPUs again where a cleaner of temporary files has removed them.
    """

    public_socket: socket.socket | None = None
    gpus: tuple[int, ...] = ()
    internal_socket: socket.socket | None = None
    advertised: str = ""
    renew_claims: Callable[[], object] = object


def main(arguments: Sequence[str], alone: Standalone | None = None) -> int:
    """Run one worker; return the exit code."""
    import uvloop

    from dynaplan.worker.worker_runtime import EXIT_CRASHED

    try:
        options = _options(arguments)
        environment = WorkerEnvironment.read(os.environ, options["service-name"])
        return uvloop.run(_run_worker(options, environment, _prepare_process(environment), alone))
    except (DeploymentError, TemporaryError) as error:  # of this moment, and not of what the user wrote
        print(f"this worker cannot start now: {error}", file=sys.stderr, flush=True)
        return EXIT_PROGRAM_ENDED if isinstance(error, ProgramEnded) else EXIT_CRASHED
    except (UserError, WorkerStartFailed) as error:
        print(f"this worker can never start: {error}", file=sys.stderr, flush=True)
        return EXIT_CANNOT_START
    except Exception:
        logging.getLogger(__name__).exception("this worker crashed")
        return EXIT_CRASHED


def _prepare_process(environment: WorkerEnvironment) -> LogFile | None:
    """Make this process end with its parent, and write into the worker's own log; return that log, if any."""
    if environment.parent_pid:
        die_with_parent(environment.parent_pid)
    log_file = None
    if environment.log_dir:
        log_file = LogFile(Path(environment.log_dir) / f"{environment.worker_name}.log")
        log_file.redirect()
    configure_logging()
    return log_file


async def _run_worker(
    options: Mapping[str, str],
    environment: WorkerEnvironment,
    log_file: LogFile | None,
    alone: Standalone | None,
) -> int:
    from dynaplan.http.accept_shares import AcceptShares
    from dynaplan.http.limits import ConnectionLimits
    from dynaplan.store import connections
    from dynaplan.worker.hosting import Host
    from dynaplan.worker.lifecycle import WorkerLifecycle
    from dynaplan.worker.server import WorkerServer

    # First of all, so that nothing that this process starts inherits it.
    inherited = (alone and alone.public_socket) or socket_of_stdin(environment.port)
    service = _service(options)
    if inherited and not _is_public(service):
        inherited.close()
        inherited = None
    is_remote = _is_public(service) or (alone is not None and alone.internal_socket is not None)
    tls = certificates.own_certificate(os.environ) if is_remote else None
    server = _internal_server(alone, environment.worker_token, tls)
    store = connections.connect_store()
    runtime = await _runtime(service, environment, server.url, store)
    runtime.public_socket, runtime.server_tls = inherited, tls
    if alone:
        _mark_unmanaged(runtime, alone, service)
    if log_file:
        runtime.spawn(log_file.watch(runtime.clock), "log file")
    runtime.spawn(runtime.discovery.wait_failed(), "discovery")
    _fill_context(service, runtime, options)

    def public() -> WorkerServer:
        listen_on = inherited or bound_socket(environment.host, environment.port, is_shared=True)
        directory = Path(environment.runtime_dir, "connections") if environment.runtime_dir else None
        limits = ConnectionLimits(option="ulimit -n")
        return WorkerServer(listen_on, environment.api_key, limits, tls=tls, shares=AcceptShares(directory))

    host = Host(service, runtime)
    deadline_s = _number(runtime.settings, "drain-deadline", environment.drain_deadline_s)
    try:
        lifecycle = WorkerLifecycle(runtime, server, public, deadline_s, is_in_foreground=alone is not None)
        return await lifecycle.run(host.prepare)
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await host.close()
                await runtime.close()
                await runtime.discovery.close()
                await store.close()


def _internal_server(alone: Standalone | None, token: str, tls: ServerTls | None) -> WorkerServer:
    """Return the worker's own server: in clear on loopback, or where other hosts reach it."""
    from dynaplan.worker.server import WorkerServer

    if alone and alone.internal_socket:
        return WorkerServer(alone.internal_socket, token, advertised=alone.advertised, tls=tls)
    return WorkerServer(bound_socket("127.0.0.1", 0), token)


def _mark_unmanaged(runtime: WorkerRuntime, alone: Standalone, service: Service[Any]) -> None:
    runtime.is_managed = False
    runtime.describe(role=service.role.value, gpus=list(alone.gpus))
    runtime.spawn(_renew_claims(runtime, alone), "GPU claims")


async def _renew_claims(runtime: WorkerRuntime, alone: Standalone) -> None:
    """Check the claims from time to time, as the fleet plugin does those of its workers."""

    while alone.gpus:
        await runtime.clock.sleep(CLAIMS_POLL_S)
        try:
            await asyncio.to_thread(alone.renew_claims)
        except DeploymentError as error:
            logging.getLogger(__name__).warning("%s", error)


def _is_public(service: Service[Any]) -> bool:
    """Tell whether the service listens on the public port."""
    return service.role is Role.FRONTEND or any(each.is_public for each in service.endpoints.values())


def _service(options: Mapping[str, str]) -> Service[Any]:
    from dynaplan.config.model_entries import components_of, planned_models, prefill_components_of
    from dynaplan.graph.loading import load_graph

    config = ServiceConfig.get_instance()
    models = config.get(MODELS) or {}
    graph = load_graph(options["graph"], Path.cwd()).with_models(
        components_of(models), planned_models(config), prefill_components_of(models)
    )
    return graph.service(options["service-name"])


async def _runtime(
    service: Service[Any], environment: WorkerEnvironment, url: str, store: Store
) -> WorkerRuntime:
    from dynaplan.store import lease_owners
    from dynaplan.store.discovery import Discovery
    from dynaplan.worker.worker_runtime import WorkerRuntime

    settings = section_options(ServiceConfig.get_instance(), service.name)
    reconnects = ProcessSettings.from_options(settings).nats_max_reconnects
    network = process_table.network()
    discovery = Discovery(store, environment.namespace, network)
    await discovery.start()
    return WorkerRuntime(
        namespace=environment.namespace,
        component=service.name,
        worker_name=environment.worker_name,
        worker_token=environment.worker_token,
        url=url,
        store=store,
        clock=SystemClock(),
        discovery=discovery,
        settings=settings,
        connect_messenger=partial(event_connections.connect_messenger, max_reconnects=reconnects),
        connect_events=partial(event_connections.connect_events, max_reconnects=reconnects),
        gpus=environment.gpus,
        scratch_dir=environment.scratch_dir,
        memory_fraction=environment.memory_fraction,
        role=service.role,
        is_on_request=bool(service.model),
        lease_ttl_s=environment.lease_ttl_s,
        network=network,
        owner=lease_owners.this_process(),
        client_tls=certificates.authorities(os.environ),
    )


def _fill_context(service: Service[Any], runtime: WorkerRuntime, options: Mapping[str, str]) -> None:
    from dynaplan.graph.service import dynamo_context

    dynamo_context.update(
        service_name=service.name,
        namespace=runtime.namespace,
        worker_id=options["worker-id"],
        runtime=runtime,
        runner_map={},
        component=service.name,
        endpoints=list(service.endpoints),
    )


def _options(arguments: Sequence[str]) -> dict[str, str]:
    """GRAPH and ``--name value`` pairs; argparse would cost more to import than this saves to write."""
    graph, *rest = arguments or ("",)
    named = dict(zip((name.removeprefix("--") for name in rest[::2]), rest[1::2], strict=False))
    options = {"worker-id": "1", "service-name": "", **named, "graph": graph}
    if not graph or not options["service-name"]:
        raise ConfigError("GRAPH and --service-name are needed", hint="dynaplan serve runs this command.")
    return options


def _number(values: Mapping[str, Any], key: str, default: float) -> float:
    value = values.get(key, default)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{key}: {value!r} is not a number", hint="Expected a number, as in 30.") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
