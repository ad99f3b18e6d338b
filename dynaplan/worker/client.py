"""Clients of dependencies: a service holds one for each, and calls another service's endpoints by it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any

import aiohttp

from dynaplan.store.discovery import Discovery
from dynaplan.worker.calls.endpoint_client import FIND_INSTANCE_S, EndpointClient
from dynaplan.worker.calls.http_calls import worker_session
from dynaplan.worker.endpoints import ServedEndpoint, items_of, plain

__all__ = ["DependencyClient", "LocalClient", "worker_session"]

Call = Callable[..., AsyncGenerator[Any, None]]


class DependencyClient:
    """``client.<endpoint>(request)`` yields the items that an instance of the service answers with.

    Made once per dependency. Instances are taken in turn; the errors are those of ``EndpointClient``. A
    RequestRefused that the caller's own endpoint does not catch is answered with its status: what is wrong
    came from the caller's caller, or from the caller.
    """

    def __init__(
        self,
        service: str,
        endpoints: Iterable[str],
        discovery: Discovery,
        session: aiohttp.ClientSession,
        find_instance_s: float = FIND_INSTANCE_S,
    ) -> None:
        self._service = service
        self._clients = {
            name: EndpointClient(service, name, discovery, session, find_instance_s) for name in endpoints
        }

    def __getattr__(self, name: str) -> Call:
        if name.startswith("__") or name not in self._clients:
            raise _unknown_endpoint(name, self._service, self._clients)
        return self._clients[name].round_robin


class LocalClient:
    """The same calls for a dependency that lives in this process: no network, plain method calls."""

    def __init__(self, service: str, endpoints: Mapping[str, ServedEndpoint]) -> None:
        self._service = service
        self._endpoints = endpoints

    def __getattr__(self, name: str) -> Call:
        if name.startswith("__") or name not in self._endpoints:
            raise _unknown_endpoint(name, self._service, self._endpoints)

        def call(request: Any = None) -> AsyncGenerator[Any, None]:
            return items_of(self._endpoints[name], plain(request))

        return call


def _unknown_endpoint(name: str, service: str, endpoints: Iterable[str]) -> AttributeError:
    return AttributeError(
        f"No Dynamo endpoint '{name}' found on service '{service}'. Available endpoints: {list(endpoints)}"
    )
