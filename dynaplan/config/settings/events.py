"""What the environment of a deployment's processes says of events: all of them travel over NATS."""

from __future__ import annotations

from collections.abc import Mapping

from dynaplan.config.settings.servers import NATS
from dynaplan.util.errors import ConfigError

PLANE_VARIABLE = "DYN_EVENT_PLANE"
MAX_AGE_VARIABLE = "DYN_NATS_STREAM_MAX_AGE"

HOST_VARIABLE = "DYNAPLAN_ADVERTISE_HOST"
"""The name or address by which other hosts reach this one, as ``--advertise-host``."""

COMPAT_VARIABLE = "DYNAPLAN_COMPAT"
"""The original whose modules can be imported, and whose events are spoken; empty for none. A deployment's
processes inherit it."""

MAX_AGE_S = 3600.0
"""Time for which events are kept, unless ``DYN_NATS_STREAM_MAX_AGE`` says another."""

_ORIGINAL = "dynamo"


def is_nats_wanted(environ: Mapping[str, str]) -> bool:
    """Tell whether a NATS server is to run for the events of a graph's own services.

    Raises ConfigError for anything that the environment says wrongly of events.
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
