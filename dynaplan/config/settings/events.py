"""The event plane of a deployment, as the environment of its processes names it."""

from __future__ import annotations

from collections.abc import Mapping

from dynaplan.config.settings.servers import NATS, NATS_VARIABLE
from dynaplan.util.errors import ConfigError, nearest

PLANE_VARIABLE = "DYN_EVENT_PLANE"
MAX_AGE_VARIABLE = "DYN_NATS_STREAM_MAX_AGE"

HOST_VARIABLE = "DYNAPLAN_ADVERTISE_HOST"
"""The name or address by which other hosts reach this one, as ``--advertise-host``; for ZMQ, too."""


COMPAT_VARIABLE = "DYNAPLAN_COMPAT"
"""The original whose modules can be imported, and whose events are spoken; empty for none. A deployment's
processes inherit it."""

ZMQ = "zmq"
PLANES = (NATS, ZMQ)

MAX_AGE_S = 3600.0
"""Time for which events are kept, unless ``DYN_NATS_STREAM_MAX_AGE`` says another."""

_ORIGINAL = "dynamo"


def event_plane(environ: Mapping[str, str]) -> str:
    """Return how events travel: ``nats`` or ``zmq``; unless it is said, by NATS where there is a NATS server.

    Raises ConfigError for any other word.
    """
    text = environ.get(PLANE_VARIABLE, "").strip()
    word = text.lower()
    if word and word not in PLANES:
        raise ConfigError(
            f"{PLANE_VARIABLE} is {text!r}: there is no such event plane", hint=nearest(word, PLANES)
        )
    return word or (NATS if environ.get(NATS_VARIABLE) else ZMQ)


def checked_event_plane(environ: Mapping[str, str]) -> str:
    """Return ``event_plane``, once all that the environment says of events is right; raises ConfigError."""
    max_age_s(environ)
    is_original(environ)
    return event_plane(environ)


def max_age_s(environ: Mapping[str, str]) -> float:
    """Return the time in seconds for which events are kept; raises ConfigError for what is none."""
    text = environ.get(MAX_AGE_VARIABLE, "")
    try:
        seconds = float(text or MAX_AGE_S)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < 1e9:
        raise ConfigError(f"{MAX_AGE_VARIABLE} is {text!r}", hint="Expected seconds, at least 1, as in 3600.")
    return seconds


def is_original(environ: Mapping[str, str]) -> bool:
    """Tell whether events have the original's subjects and forms; raises ConfigError for an unknown word."""
    text = environ.get(COMPAT_VARIABLE, "").strip()
    if text.lower() not in ("", _ORIGINAL):
        raise ConfigError(f"{COMPAT_VARIABLE} is {text!r}", hint=f"Expected {_ORIGINAL}, or nothing.")
    return bool(text)
