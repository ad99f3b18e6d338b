"""The runtime under the names of the original: ``DistributedRuntime`` and what hangs from it.

For programs and graphs that are written against Dynamo 0.3 (``from dynamo.runtime import ...``). Every object
here only renames; all that happens is ``Runtime``'s. As there, calls are awaited first and then iterated,
items come wrapped, and an error of the other side is a ValueError.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from dynaplan.util.errors import DynaplanError, PermanentError
from dynaplan.worker.calls.endpoint_client import EndpointClient
from dynaplan.worker.endpoints import ServedEndpoint
from dynaplan.worker.membership.runtime import Runtime, RuntimeComponent, RuntimeEndpoint, RuntimeNamespace

Handler = Callable[..., AsyncGenerator[Any, None]]


@dataclass(frozen=True)
class Annotated:
    """One item of an answer, as the original's clients yield it."""

    item: Any

    def data(self) -> Any:
        """Return the item: what the handler yielded, by way of JSON."""
        return self.item

    def id(self) -> None:
        """Return the event's id: there is none."""

    def event(self) -> None:
        """Return the event's name: there is none."""

    def comments(self) -> list[str]:
        """Return the event's comments: there are none."""
        return []

    def is_error(self) -> bool:
        """Return False: an error is raised here."""
        return False


@dataclass(frozen=True)
class DistributedClient:
    """A client of an endpoint: ``async for item in await client.round_robin(request)``."""

    client: EndpointClient

    async def generate(self, request: Any) -> AsyncIterator[Annotated]:
        """Call an instance chosen by chance; the answer's items come as they are made."""
        return _annotated(self.client.random(request))

    async def random(self, request: Any) -> AsyncIterator[Annotated]:
        """Call an instance that is drawn at random."""
        return _annotated(self.client.random(request))

    async def round_robin(self, request: Any) -> AsyncIterator[Annotated]:
        """Call the instance after the one that this client called last."""
        return _annotated(self.client.round_robin(request))

    async def direct(self, request: Any, instance_id: int) -> AsyncIterator[Annotated]:
        """Call the instance with this id; raises what a client raises when it is gone."""
        return _annotated(self.client.direct(request, int(instance_id)))

    def instance_ids(self) -> list[int]:
        """Return the ids of the instances that are registered now."""
        return list(self.client.instance_ids())

    async def wait_for_instances(self) -> list[int]:
        """Wait until there is an instance; return the ids."""
        return list(await self.client.wait_for_instances())


@dataclass(frozen=True)
class DistributedEndpoint:
    """The original's name for one endpoint of a component: it is served, or called by a client."""

    endpoint: RuntimeEndpoint

    async def serve_endpoint(self, handler: Handler, **_ignored: Any) -> None:
        """Serve it until this process is told to leave; the handler takes the request as plain data."""
        component = self.endpoint.component
        served = [ServedEndpoint(self.endpoint.name, handler)]
        await component.namespace.runtime.serve(component.namespace.name, component.name, served)

    async def client(self) -> DistributedClient:
        """Return a client of its instances."""
        return DistributedClient(await self.endpoint.client())

    def lease_id(self) -> int:
        """Return the id of the lease that it is registered under here; PermanentError before that."""
        component = self.endpoint.component
        for each in component.namespace.runtime.served(component.namespace.name, component.name):
            return each
        raise PermanentError(
            f"{component.name}.{self.endpoint.name} is not registered yet, so it has no lease",
            hint="Ask for the lease in an endpoint or a task, not in __init__ or a start hook.",
        )


@dataclass(frozen=True)
class DistributedComponent:
    """The original's name for a component: processes that serve the same endpoints."""

    component: RuntimeComponent

    async def create_service(self) -> None:
        """Do nothing: a component is there as soon as an endpoint of it is served."""

    def endpoint(self, name: str) -> DistributedEndpoint:
        """Return the endpoint of that name."""
        return DistributedEndpoint(self.component.endpoint(name))


@dataclass(frozen=True)
class DistributedNamespace:
    """The original's name for a namespace: the components of one deployment."""

    namespace: RuntimeNamespace

    def component(self, name: str) -> DistributedComponent:
        """Return the component of that name."""
        return DistributedComponent(self.namespace.component(name))


@dataclass(frozen=True)
class DistributedRuntime:
    """The original's door to namespaces, over this process's own runtime."""

    runtime: Runtime

    def namespace(self, name: str, path: str = "") -> DistributedNamespace:
        """Return the namespace of that name."""
        return DistributedNamespace(self.runtime.namespace(name))

    def shutdown(self) -> None:
        """Drain what this process serves, and let ``serve_endpoint`` return."""
        self.runtime.leave("shutdown() was called")


def dynamo_endpoint(request_model: Any, response_model: Any) -> Callable[[Handler], Handler]:
    """Make a handler's last argument an instance of ``request_model``, a pydantic model, as there.

    A request that does not fit is a ValueError. ``response_model`` is not looked at, there as here.
    """

    def decorate(function: Handler) -> Handler:
        @wraps(function)
        async def handler(*arguments: Any, **named: Any) -> AsyncGenerator[Any, None]:
            given = list(arguments)
            if len(given) in (1, 2) and hasattr(request_model, "model_validate"):
                given[-1] = _fitted(request_model, given[-1])
            async for item in function(*given, **named):
                yield item

        return handler

    return decorate


def _fitted(model: Any, request: Any) -> Any:
    if isinstance(request, model):
        return request
    try:
        is_text = isinstance(request, str)
        return model.model_validate_json(request) if is_text else model.model_validate(request)
    except ValueError as error:
        raise ValueError(f"Invalid request: {error}") from error


async def _annotated(items: AsyncGenerator[Any, None]) -> AsyncGenerator[Annotated, None]:
    try:
        async for item in items:
            yield Annotated(item)
    except DynaplanError as error:
        raise ValueError(str(error)) from error
    finally:
        await items.aclose()
