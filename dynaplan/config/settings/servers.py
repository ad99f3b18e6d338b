"""What the processes of a deployment share, as their environment names it: servers, events and TLS.

``DYN_DISCOVERY_BACKEND`` chooses the key-value store, and other variables say where it is: ``ETCD_ENDPOINTS``
and ``ETCD_AUTH_*``, ``NATS_SERVER`` and ``NATS_AUTH_*``, ``DYN_FILE_KV``, or ``POD_NAMESPACE``.
``DYN_EVENT_PLANE`` asks for a NATS server for the events of a graph's own services.

TLS is that of the ports that other hosts reach. Its files belong to a host and not to a graph, so they are
options of commands, and no keys of a YAML file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from dynaplan.config.settings.fields import READ, Options, Settings, option, options_of
from dynaplan.util.documents import shown, whole_number
from dynaplan.util.errors import ConfigError, nearest
from dynaplan.util.masking import mask_secrets


@dataclass(frozen=True)
class TlsSettings(Settings):
    """The PEM files of TLS; None for clear text, and for the authorities that the system trusts."""

    READS_TEXT = True

    tls_cert: str | None = option(
        None,
        "Certificate of this host, with its chain: the public port and `--advertise-host` speak https",
        path=READ,
    )
    tls_key: str | None = option(None, "The certificate's private key", path=READ)
    tls_ca: str | None = option(
        None,
        "Certificates of the authorities that vouch for other hosts' components",
        path=READ,
        default_text="the system's",
    )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """Read the variables; raises ConfigError for one file of certificate and key without the other."""
        given = {name: environ[variable] for name, variable in TLS_VARIABLES.items() if environ.get(variable)}
        return cls.from_options(given, TLS_VARIABLES)

    def check(self, given: frozenset[str] = frozenset()) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            has, lacks = ("tls-cert", "tls-key") if self.tls_cert else ("tls-key", "tls-cert")
            raise ConfigError(
                f"--{has} is given without --{lacks}",
                hint=f"Certificate and key belong together; {TLS_VARIABLES[lacks]} names the other one, too.",
            )


TLS_OPTIONS: Options = options_of(TlsSettings)

TLS_VARIABLES: Mapping[str, str] = {
    "tls-cert": "DYNAPLAN_TLS_CERT",
    "tls-key": "DYNAPLAN_TLS_KEY",
    "tls-ca": "DYNAPLAN_TLS_CA",
}
"""Option -> the variable by which a deployment's processes have it."""

CA_VARIABLE = TLS_VARIABLES["tls-ca"]


@dataclass(frozen=True)
class MessagingSettings(Settings):
    """The patience of a process with the NATS server."""

    nats_max_reconnects: int = option(
        -1, "Attempts to reach a NATS server that has gone, before it is given up; -1 is for ever", minimum=-1
    )


BACKEND_VARIABLE = "DYN_DISCOVERY_BACKEND"
ETCD_VARIABLE = "ETCD_ENDPOINTS"
NATS_VARIABLE = "NATS_SERVER"
FILE_VARIABLE = "DYN_FILE_KV"
CLUSTER_VARIABLE = "POD_NAMESPACE"

TOKEN_VARIABLE = "DYNAPLAN_WORKER_TOKEN"
"""The bearer token of every worker's HTTP routes."""

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

MIN_LEASE_TTL_S, MAX_LEASE_TTL_S = 5, 30

_CLIENT_PREFIXES = (
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

    Raises ConfigError for any other value; ``where`` names its source in the message.
    """
    text = environ.get(BACKEND_VARIABLE, "").strip()
    word = text.lower().replace("-", "_")
    if word and word not in BACKENDS:
        raise ConfigError(
            f"{where} is {text!r}: there is no such key-value store", hint=nearest(word, PLACES)
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
    if number is None or not MIN_LEASE_TTL_S <= number <= MAX_LEASE_TTL_S:
        raise ConfigError(
            f"{LEASE_TTL_VARIABLE} is {shown(text)}: expected whole seconds,"
            f" from {MIN_LEASE_TTL_S} to {MAX_LEASE_TTL_S}",
            hint=f"Unset it for {LEASE_TTL_S} s.",
        )
    return number


def has_store_address(environ: Mapping[str, str]) -> bool:
    """Tell whether the chosen store's address is set; raises ConfigError for an unknown store."""
    return bool(environ.get(PLACES.get(store_backend(environ), "")))


def has_no_nats(environ: Mapping[str, str]) -> bool:
    """Tell whether the deployment has no NATS server: the variable is there, and empty."""
    return environ.get(NATS_VARIABLE) == ""


def client_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which a client finds the servers, passwords and tokens included."""
    return {name: value for name, value in environ.items() if name.startswith(_CLIENT_PREFIXES)}


def server_addresses(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the store's name as ``store``, and by name the addresses of it and of NATS that are set."""
    backend = store_backend(environ)
    found = {name: environ.get(PLACES[name], "") for name in (backend, NATS)}
    return {"store": backend, **{name: place for name, place in found.items() if place}}


def describe_other_store(environ: Mapping[str, str]) -> str:
    """Return a store other than etcd, and where it is, for people; empty for etcd."""
    found = server_addresses(environ)
    place = mask_secrets(found.get(found["store"], ""))
    return "" if found["store"] == ETCD else f"{found['store']}, {place}"


PLANE_VARIABLE = "DYN_EVENT_PLANE"
MAX_AGE_VARIABLE = "DYN_NATS_STREAM_MAX_AGE"

HOST_VARIABLE = "DYNAPLAN_ADVERTISE_HOST"
"""The name or address by which other hosts reach this one, as ``--advertise-host``."""

COMPAT_VARIABLE = "DYNAPLAN_COMPAT"
"""The original whose modules can be imported, and whose events are spoken; empty for none. A deployment's
processes inherit it."""

MAX_AGE_S = 3600.0
"""Time for which events are kept, unless ``DYN_NATS_STREAM_MAX_AGE`` says another."""

_DYNAMO = "dynamo"


def is_nats_wanted(environ: Mapping[str, str]) -> bool:
    """Tell whether a NATS server is to run for the events of a graph's own services.

    Raises ConfigError for any invalid variable about events.
    """
    max_age_s(environ)
    is_original(environ)
    text = environ.get(PLANE_VARIABLE, "").strip()
    if text.lower() not in ("", NATS):
        raise ConfigError(
            f"{PLANE_VARIABLE} is {text!r}: events travel over NATS alone",
            hint=f"Unset it; {NATS} starts a NATS server for the events of your own services.",
        )
    return bool(text)


def max_age_s(environ: Mapping[str, str]) -> float:
    """Return the time in seconds for which events are kept; raises ConfigError for an invalid one."""
    text = environ.get(MAX_AGE_VARIABLE, "")
    try:
        seconds = float(text or MAX_AGE_S)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < 1e9:
        raise ConfigError(f"{MAX_AGE_VARIABLE} is {text!r}", hint="Expected seconds, at least 1, as in 3600.")
    return seconds


def is_original(environ: Mapping[str, str]) -> bool:
    """Tell whether events have Dynamo's subjects and forms; raises ConfigError for an unknown value."""
    text = environ.get(COMPAT_VARIABLE, "").strip()
    if text.lower() not in ("", _DYNAMO):
        raise ConfigError(f"{COMPAT_VARIABLE} is {text!r}", hint=f"Expected {_DYNAMO}, or nothing.")
    return bool(text)
