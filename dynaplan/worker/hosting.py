"""Makes the service of a worker: its instance, the clients of its dependencies, its hooks."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from typing import Any

from dynaplan.graph.endpoints import Hook, hooks_of
from dynaplan.graph.lifecycle import Role
from dynaplan.graph.service import Service
from dynaplan.http.client import HttpClient
from dynaplan.store.discovery import Discovery
from dynaplan.worker.endpoint_client import EndpointClient
from dynaplan.worker.endpoints import ServedEndpoint, call_endpoint, to_plain
from dynaplan.worker.lifecycle import HostedService
from dynaplan.worker.timing import FIND_INSTANCE_S
from dynaplan.worker.worker_runtime import WorkerRuntime

ENGINE_ENDPOINT = "generate"
"""The endpoint that a decode or prefill worker registers, also when its class has only an engine."""

NO_ENDPOINT = "health"
"""The name that a service without endpoints registers, so that others see that it is ready."""


class Host:
    """Hosts a service, and the dependencies that it wants in its own process.

    Clients are bound before ``__init__`` runs, one per dependency: over the network for services with a
    process of their own, plain calls for those of this one.
    """

    def __init__(self, service: Service[Any], runtime: WorkerRuntime) -> None:
        self._service = service
        self._runtime = runtime
        self._http: HttpClient | None = None
        self._instances: dict[str, Any] = {}
        self._services: dict[str, Service[Any]] = {}

    async def prepare(self) -> HostedService:
        """Make the instances and run their start hooks, those of a dependency before those of its user."""
        self._make(self._service)
        for hook in list(self._hooks(Hook.START)):
            result = hook()
            if inspect.isawaitable(result):
                await result
        return HostedService(
            endpoints=tuple(self._served(self._service).values()),
            registered=registered_names(self._service),
            shutdown_hooks=tuple(self._hooks(Hook.SHUTDOWN)),
            checks={path: checks for path, checks in self._checks().items() if checks},
        )

    def _checks(self) -> dict[str, tuple[Callable[[], Any], ...]]:
        return {
            "/healthz": tuple(self._hooks(Hook.LIVENESS)),
            "/readyz": tuple(self._hooks(Hook.READINESS)),
        }

    async def close(self) -> None:
        """Close the connections of the clients."""
        if self._http:
            await self._http.close()

    def _make(self, service: Service[Any]) -> Any:
        if service.name in self._instances:
            return self._instances[service.name]
        inner: Any = service.inner
        instance = self._instances[service.name] = inner.__new__(inner)
        for attribute, dependency in service.dependencies.items():
            service.bind(instance, attribute, self._client(dependency))
        instance.__init__()
        self._services[service.name] = service
        return instance

    def _client(self, dependency: Service[Any]) -> Any:
        if dependency.in_process_of == self._service.name:
            self._make(dependency)
            return LocalClient(dependency.name, self._served(dependency))
        runtime = self._runtime
        self._http = self._http or HttpClient(runtime.worker_token, runtime.client_tls)
        return DependencyClient(dependency.name, dependency.endpoints, runtime.discovery, self._http)

    def _served(self, service: Service[Any]) -> dict[str, ServedEndpoint]:
        instance = self._instances[service.name]
        return {
            name: ServedEndpoint(name, getattr(instance, each.method_name), each.request_type, each.is_public)
            for name, each in service.endpoints.items()
        }

    def _hooks(self, hook: Hook) -> Iterator[Callable[[], Any]]:
        for service in self._services.values():
            for name in hooks_of(service.inner, hook):
                yield getattr(self._instances[service.name], name)


def registered_names(service: Service[Any]) -> tuple[str, ...]:
    """Return the names under which the service's worker registers: those of its endpoints.

    An engine's worker adds ENGINE_ENDPOINT; one without any registers NO_ENDPOINT.
    """
    names = dict.fromkeys(service.endpoints)
    if service.role in (Role.DECODE, Role.PREFILL):
        names[ENGINE_ENDPOINT] = None
    return tuple(names or (NO_ENDPOINT,))


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
        http: HttpClient,
        find_instance_s: float = FIND_INSTANCE_S,
    ) -> None:
        self._service = service
        self._clients = {
            name: EndpointClient(service, name, discovery, http, find_instance_s) for name in endpoints
        }

    def __getattr__(self, name: str) -> Call:
        if name.startswith("__") or name not in self._clients:
            raise _unknown_endpoint(name, self._service, self._clients)
        return self._clients[name].round_robin


class LocalClient:
    """A ``DependencyClient`` for a service in this process: its endpoints are called as plain methods."""

    def __init__(self, service: str, endpoints: Mapping[str, ServedEndpoint]) -> None:
        self._service = service
        self._endpoints = endpoints

    def __getattr__(self, name: str) -> Call:
        if name.startswith("__") or name not in self._endpoints:
            raise _unknown_endpoint(name, self._service, self._endpoints)

        def call(request: Any = None) -> AsyncGenerator[Any, None]:
            return call_endpoint(self._endpoints[name], to_plain(request))

        return call


def _unknown_endpoint(name: str, service: str, endpoints: Iterable[str]) -> AttributeError:
    return AttributeError(
        f"No Dynamo endpoint '{name}' found on service '{service}'. Available endpoints: {list(endpoints)}"
    )
