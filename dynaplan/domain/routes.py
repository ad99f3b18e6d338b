"""Routes of a worker's HTTP server, without the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Route:
    """One HTTP route. ``handler`` takes the server's request and returns its response.

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
