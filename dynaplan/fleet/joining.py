"""``dynaplan.runtime.connect``: find a deployment, and join it."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dynaplan.config import certificates
from dynaplan.config.settings.servers import (
    BACKEND_VARIABLE,
    HOST_VARIABLE,
    MEMORY,
    NATS,
    PLACES,
    TOKEN_VARIABLE,
    lease_ttl_s,
    store_backend,
)
from dynaplan.config.settings.worker import ProcessSettings
from dynaplan.events import event_connections
from dynaplan.fleet.runtime_dir import read_token
from dynaplan.process import process_table
from dynaplan.store import connections
from dynaplan.store.lease_owners import this_process
from dynaplan.store.memory import process_store
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import ConfigError, DeploymentError, QueueUnavailable, StoreUnavailable
from dynaplan.util.masking import mask_secrets
from dynaplan.worker.distributed_runtime import Runtime
from dynaplan.worker.server import bind_advertised

if TYPE_CHECKING:
    from dynaplan.events.port import EventPlane
    from dynaplan.store.port import Store

STORE_TIMEOUT_S = 5.0
"""Longest time for the store's first answer."""

DEFAULT_NAMESPACE = "dynamo"
NAMESPACE_VARIABLE = "DYN_NAMESPACE"

_TOKEN_OF_THIS_PROCESS = secrets.token_urlsafe(32)


@asynccontextmanager
async def connect(
    namespace: str | None = None,
    *,
    store: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    advertise_host: str | None = None,
    drain_deadline_s: float = ProcessSettings.drain_deadline_s,
) -> AsyncIterator[Runtime]:
    """Join a deployment: ``async with dynaplan.runtime.connect() as runtime``.

    Without arguments it is the one that runs on this host as this user, found by its statefile; with several
    ``namespace`` chooses. With ``store`` or ``token_file`` it is the one at the store that the environment
    names (``ETCD_ENDPOINTS`` and ``ETCD_AUTH_*``, or ``DYN_FILE_KV``), with the token in the file or in
    ``DYNAPLAN_WORKER_TOKEN``; the same holds inside a process of a deployment, which has all of that in its
    environment. Without a token, where no deployment runs here and the environment names a store, keys of
    that store can be followed and written, as an orchestrator does. ``store="mem"`` needs no deployment: the
    store is this process's own.

    ``advertise_host`` is the name or address of this machine by which other hosts reach what is served here,
    as ``--advertise-host``; ``DYNAPLAN_ADVERTISE_HOST`` stands for it, and ``DYNAPLAN_TLS_CERT``, ``_KEY``
    and ``_CA`` for files of TLS.

    When the block ends, what is still served is drained, for ``drain_deadline_s`` seconds at most. Raises
    DeploymentError when no deployment is found, ConfigError when an argument is wrong, and StoreUnavailable,
    worth a retry, when the store does not answer.
    """
    has_token = bool(token_file or os.environ.get(TOKEN_VARIABLE))
    environ = _surroundings(namespace, store, token_file)
    environ = _with_host(environ, advertise_host, has_token=has_token)
    is_in_memory = store_backend(environ) == MEMORY
    connection = process_store() if is_in_memory else connections.connect_store(environ)
    try:
        await _answers(connection, environ)
        own_namespace = namespace or environ.get(NAMESPACE_VARIABLE) or DEFAULT_NAMESPACE
        runtime = _runtime(connection, environ, own_namespace, drain_deadline_s)
        try:
            yield runtime
        finally:
            await runtime.close()
    finally:
        if not is_in_memory:
            await connection.close()


def join() -> Runtime:
    """Join the deployment that ``connect()`` without arguments joins, and do not wait for the store's answer.

    ``Runtime.close`` leaves it. Raises DeploymentError when no deployment is found.
    """
    environ = _surroundings(None, None, None)
    connection = connections.connect_store(environ)
    own_namespace = environ.get(NAMESPACE_VARIABLE) or DEFAULT_NAMESPACE
    return _runtime(connection, environ, own_namespace, ProcessSettings.drain_deadline_s)


def _runtime(
    connection: Store, environ: Mapping[str, str], own_namespace: str, drain_deadline_s: float
) -> Runtime:
    host = environ.get(HOST_VARIABLE, "")
    return Runtime(
        host=host,
        server_tls=certificates.own_certificate(environ) if host else None,
        client_tls=certificates.authorities(environ),
        own_namespace=own_namespace,
        store=connection,
        clock=SystemClock(),
        token=environ[TOKEN_VARIABLE],
        connect_messenger=lambda: event_connections.connect_messenger(environ),
        connect_events=lambda: _connect_events(environ),
        network=process_table.network(),
        owner=this_process(),
        drain_deadline_s=drain_deadline_s,
        lease_ttl_s=lease_ttl_s(environ),
    )


async def _connect_events(environ: Mapping[str, str]) -> EventPlane:
    if store_backend(environ) == MEMORY and not environ.get(PLACES[NATS]):
        raise QueueUnavailable(
            "a store in this process's memory has no event plane: events travel through a NATS server",
            hint=f"Set {PLACES[NATS]} to the address of one (`nats-server -js`), or connect to a deployment.",
        )
    return await event_connections.connect_events(environ)


def _with_host(environ: Mapping[str, str], host: str | None, *, has_token: bool) -> Mapping[str, str]:
    """Return the environment with the host by which programs of other hosts reach this one.

    That is ``host``, else the variable's value; empty where only this host reaches it. Raises ConfigError for
    a host that is no address of this machine, and for any without a token (``has_token``).
    """
    address = bind_advertised(environ.get(HOST_VARIABLE) if host is None else host, has_token=has_token)
    if address is None:
        return {**environ, HOST_VARIABLE: ""}
    address.socket.close()
    certificates.check(environ, address.host)
    return {**environ, HOST_VARIABLE: address.host}


def _surroundings(
    namespace: str | None, store: str | None, token_file: str | os.PathLike[str] | None
) -> Mapping[str, str]:
    """Return the addresses and the token, as variables; never to be printed."""
    environ = {**os.environ, **({BACKEND_VARIABLE: store} if store else {})}
    if store_backend(environ, "store" if store else BACKEND_VARIABLE) == MEMORY:
        return {**environ, TOKEN_VARIABLE: _TOKEN_OF_THIS_PROCESS}
    token = read_token(Path(token_file)) if token_file else environ.get(TOKEN_VARIABLE, "")
    is_of_this = namespace in (None, environ.get(NAMESPACE_VARIABLE))
    if store or token_file or (token and is_of_this):
        if not token:
            raise ConfigError(
                "the deployment's token is missing",
                hint=f"Give token_file=, or set {TOKEN_VARIABLE}.",
            )
        return {**environ, TOKEN_VARIABLE: token}
    from dynaplan.fleet.deployments import find_deployment

    try:
        return {**os.environ, **find_deployment(namespace).environment()}
    except DeploymentError:
        if not environ.get(PLACES.get(store_backend(environ), "")):
            raise
        # A store's keys need no token of a deployment; its processes refuse this one.
        return {**environ, TOKEN_VARIABLE: _TOKEN_OF_THIS_PROCESS}


async def _answers(store: Store, environ: Mapping[str, str]) -> None:
    try:
        async with asyncio.timeout(STORE_TIMEOUT_S):
            await store.identity()
    except (TimeoutError, StoreUnavailable) as error:
        where = mask_secrets(environ.get(PLACES.get(store_backend(environ), "")) or "its usual place")
        raise StoreUnavailable(
            f"the key-value store at {where} does not answer: {error or 'no answer in time'}",
            hint="Is the deployment running? `dynaplan status` tells.",
        ) from error
