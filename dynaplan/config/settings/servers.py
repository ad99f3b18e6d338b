"""The servers that the processes of a deployment share, as their environment names them.

``DYN_DISCOVERY_BACKEND`` chooses the key-value store, and other variables say where it is: ``ETCD_ENDPOINTS``
and ``ETCD_AUTH_*``, ``NATS_SERVER`` and ``NATS_AUTH_*``, ``DYN_FILE_KV``, or ``POD_NAMESPACE``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dynaplan.config.settings.fields import Settings, option
from dynaplan.config.settings.tls import VARIABLES as TLS_VARIABLES
from dynaplan.util.documents import shown, whole_number
from dynaplan.util.errors import ConfigError, nearest
from dynaplan.util.masking import mask_secrets


@dataclass(frozen=True)
class MessagingSettings(Settings):
    """The patience of a process with the NATS server."""

    nats_max_reconnects: int = option(
        -1, "Attempts to reach a NATS server that has gone, before it is given up; -1 is for ever", least=-1
    )


BACKEND_VARIABLE = "DYN_DISCOVERY_BACKEND"
ETCD_VARIABLE = "ETCD_ENDPOINTS"
NATS_VARIABLE = "NATS_SERVER"
FILE_VARIABLE = "DYN_FILE_KV"
CLUSTER_VARIABLE = "POD_NAMESPACE"

ETCD, NATS, FILE, KUBERNETES, MEMORY = "etcd", "nats", "file", "kubernetes", "mem"

BACKENDS: Mapping[str, str] = {
    "kv_store": ETCD,
    **{name: name for name in (ETCD, NATS, FILE, KUBERNETES, MEMORY)},
}
"""Words that choose the key-value store -> the store; ``kv_store`` is the original's word for its default."""

PLACES: Mapping[str, str] = {
    ETCD: ETCD_VARIABLE,
    NATS: NATS_VARIABLE,
    FILE: FILE_VARIABLE,
    KUBERNETES: CLUSTER_VARIABLE,
}
"""Store -> the variable that says where it is."""

PATHS = (
    FILE_VARIABLE,
    *("ETCD_AUTH_CA", "ETCD_AUTH_CLIENT_CERT", "ETCD_AUTH_CLIENT_KEY"),
    *TLS_VARIABLES.values(),
)
"""The variables that hold a path."""

LEASE_TTL_VARIABLE = "ETCD_LEASE_TTL"

LEASE_TTL_S = 10
"""Time to live of a lease: the registrations of a process that is silent for longer vanish."""

SHORTEST_LEASE_TTL_S, LONGEST_LEASE_TTL_S = 5, 30

_OF_CLIENTS = (
    BACKEND_VARIABLE,
    FILE_VARIABLE,
    ETCD_VARIABLE,
    "ETCD_AUTH_",
    NATS_VARIABLE,
    "NATS_AUTH_",
    LEASE_TTL_VARIABLE,
)


def store_backend(environ: Mapping[str, str], where: str = BACKEND_VARIABLE) -> str:
    """Return the chosen store: ``etcd`` (the default), ``nats``, ``file``, ``kubernetes`` or ``mem``.

    Raises ConfigError for any other word; ``where`` is the place that the user wrote it in.
    """
    text = environ.get(BACKEND_VARIABLE, "").strip()
    word = text.lower().replace("-", "_")
    if word and word not in BACKENDS:
        raise ConfigError(
            f"{where} is {text!r}: there is no such key-value store", hint=nearest(word, BACKENDS)
        )
    return BACKENDS.get(word, ETCD)


def shared_backend(environ: Mapping[str, str], where: str = BACKEND_VARIABLE) -> str:
    """Return the chosen store, which several processes are to share; raises ConfigError for ``mem``."""
    backend = store_backend(environ, where)
    if backend == MEMORY:
        raise ConfigError(
            f"{where} is 'mem': that store lives in one process, and a deployment has several",
            hint="Use file, which needs no server either.",
        )
    return backend


def lease_ttl_s(environ: Mapping[str, str]) -> int:
    """Return the time to live, in seconds, of the leases that workers register under.

    Raises ConfigError for anything but a whole number from 5 to 30.
    """
    text = environ.get(LEASE_TTL_VARIABLE, "").strip()
    number = whole_number(text) if text else LEASE_TTL_S
    if number is None or not SHORTEST_LEASE_TTL_S <= number <= LONGEST_LEASE_TTL_S:
        raise ConfigError(
            f"{LEASE_TTL_VARIABLE} is {shown(text)}: expected whole seconds,"
            f" from {SHORTEST_LEASE_TTL_S} to {LONGEST_LEASE_TTL_S}",
            hint=f"Unset it for {LEASE_TTL_S} s.",
        )
    return number


def says_where(environ: Mapping[str, str]) -> bool:
    """Tell whether the environment says where the chosen store is; raises ConfigError for no store."""
    return bool(environ.get(PLACES.get(store_backend(environ), "")))


def is_without_nats(environ: Mapping[str, str]) -> bool:
    """Tell whether the deployment has no NATS server: the variable is there, and empty."""
    return environ.get(NATS_VARIABLE) == ""


def clients_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which a client finds the servers, passwords and tokens included."""
    return {name: value for name, value in environ.items() if name.startswith(_OF_CLIENTS)}


def server_addresses(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the store's name, and where it and the NATS server are, if there is one."""
    backend = store_backend(environ)
    found = {name: environ.get(PLACES[name], "") for name in (backend, NATS)}
    return {"store": backend, **{name: place for name, place in found.items() if place}}


def unusual_store(environ: Mapping[str, str]) -> str:
    """Return a store other than etcd, and where it is, for people; empty for etcd."""
    found = server_addresses(environ)
    place = mask_secrets(found.get(found["store"], ""))
    return "" if found["store"] == ETCD else f"{found['store']}, {place}"
