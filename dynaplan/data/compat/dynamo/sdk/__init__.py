"""The vocabulary of a graph's author, under the original's name."""

from __future__ import annotations

import os
import sys
from typing import Any

from dynaplan.sdk import (
    AbstractService,
    abstract_endpoint,
    api,
    async_on_start,
    depends,
    dynamo_context,
    endpoint,
    liveness,
    on_shutdown,
    readiness,
)
from dynaplan.sdk import service as _service

__all__ = [
    "DYNAMO_IMAGE",
    "AbstractService",
    "abstract_endpoint",
    "api",
    "async_on_shutdown",
    "async_on_start",
    "depends",
    "dynamo_api",
    "dynamo_context",
    "dynamo_endpoint",
    "endpoint",
    "liveness",
    "on_shutdown",
    "readiness",
    "service",
]

DYNAMO_IMAGE = os.environ.get("DYNAMO_IMAGE", "dynamo:latest-vllm")
"""The image of the original's containers; nothing here reads it."""

dynamo_api = api
"""The name of ``api`` in 0.2.1."""

async_on_shutdown = on_shutdown
"""The name of ``on_shutdown`` in 0.2."""


def dynamo_endpoint(
    name: str | None = None, is_api: bool = False, transports: Any = None, **_ignored: Any
) -> Any:
    """Mark an endpoint as 0.2 calls it; one that ``is_api`` is served to users, too."""
    return api(name) if is_api else endpoint(name, transports)


_ROUTES_OF_EVERY_APP = frozenset({"/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"})


def service(inner: Any = None, /, *, app: Any = None, system_app: Any = None, **arguments: Any) -> Any:
    """Make a class a service of a graph: ``dynaplan.graph.service``, which serves no FastAPI ``app``."""
    for each in filter(None, (app, system_app)):
        own = sorted({route.path for route in each.routes} - _ROUTES_OF_EVERY_APP)
        if own:
            print(
                f"Warning: {', '.join(own)} of a FastAPI app is not served: make it an @api method",
                file=sys.stderr,
            )
    return _service(inner) if inner is not None else _service(**arguments)
