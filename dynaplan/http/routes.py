"""A route of an HTTP server, and the paths that others ask for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

ROUTING_PATH = "/routing"
"""The route of a frontend's own server that returns, by worker, the source of what is known of its cache."""

TURNS_PATH = "/turns"
"""The route of a frontend's own server that returns, by model, what each key has waiting and running."""

ALL_METRICS_PATH = "/metrics/all"
"""The route of a frontend's public port with the metrics of the whole deployment."""

LOAD_HISTORY_PATH = "/metrics/history"
"""The route of a frontend's public port with the load of the last hours, as JSON."""

EVENTS = "events"
"""The source where a worker's engine reports its blocks; any other begins with "prediction" and says why."""


@dataclass(frozen=True)
class Route:
    """One HTTP route. ``handler`` takes the server's request and returns its response.

    In ``path``, ``{name}`` is a field of the request, one segment; ``*`` is anything.

    A route that ``is_open`` needs no worker token (health and metrics). A route that is not work
    (``is_work`` False) does not hold up a drain. Work that is not ``is_counted`` is refused by a draining
    worker too, but another component counts it as in flight.
    """

    method: str
    path: str
    handler: Callable[[Any], Awaitable[Any]]
    is_open: bool = False
    is_work: bool = True
    is_counted: bool = True
