"""The decorators of a service's methods: endpoints, hooks and health checks.

Each sets a mark on the function and returns the function itself, so that a service's methods can still be
called as plain methods, in a unit test for example.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar, overload

from dynaplan.util.errors import GraphError


class LinkError(GraphError, ValueError):
    """``link()`` was asked for an edge that the services' dependencies do not allow."""


class InterfaceError(GraphError, TypeError):
    """A service does not implement its interface, or a decorator got an argument that it cannot use."""


class UnboundDependency(GraphError, AttributeError):
    """A dependency of an instance was used, but no client was bound to it: it is not linked."""


F = TypeVar("F", bound=Callable[..., Any])

ENDPOINT_MARK = "__dynaplan_endpoint__"
ABSTRACT_MARK = "__dynaplan_abstract__"
HOOK_MARK = "__dynaplan_hook__"


class DynamoTransport(StrEnum):
    DEFAULT = "default"
    """Called by other services, over the request plane."""
    HTTP = "http"
    """Called by users: ``POST /{name}`` on the public port."""


class Hook(StrEnum):
    START = "start"
    SHUTDOWN = "shutdown"
    LIVENESS = "liveness"
    READINESS = "readiness"


@dataclass(frozen=True)
class EndpointMark:
    """The mark of ``@endpoint``; an empty ``name`` stands for the method's own."""

    name: str
    transports: tuple[DynamoTransport, ...]


@dataclass(frozen=True)
class Endpoint:
    """One endpoint of a service: ``name`` to its callers, ``method_name`` in its class."""

    name: str
    method_name: str
    transports: tuple[DynamoTransport, ...]
    function: Callable[..., Any]

    @property
    def is_public(self) -> bool:
        return DynamoTransport.HTTP in self.transports

    @property
    def request_type(self) -> type | None:
        """The annotated class of the first annotated argument after ``self``; None when there is none."""
        return request_type_of(self.function, skipped=1)


def request_type_of(function: Callable[..., Any], skipped: int = 0) -> type | None:
    """Return the class that the first annotated argument has, after the first ``skipped`` ones.

    None when there is none, or when the annotations cannot be read.
    """

    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):
        return None
    for argument in list(inspect.signature(function).parameters)[skipped:]:
        if argument in hints:
            found = hints[argument]
            return found if isinstance(found, type) else typing.get_origin(found)
    return None


@overload
def endpoint(name: F, /) -> F: ...
@overload
def endpoint(
    name: str | None = None, transports: Sequence[DynamoTransport] | None = None
) -> Callable[[F], F]: ...
def endpoint(name: Any = None, transports: Sequence[DynamoTransport] | None = None) -> Any:
    """Serve this method to other services, as ``name`` (default: its own name).

    The method takes one request and is an async generator of response items, or returns one item.
    Its argument may be annotated with a dataclass or a pydantic model, which the request is made into.
    """
    chosen = tuple(DynamoTransport(each) for each in transports or (DynamoTransport.DEFAULT,))

    def mark(function: F) -> F:
        setattr(function, ENDPOINT_MARK, EndpointMark(name if isinstance(name, str) else "", chosen))
        return function

    return mark(name) if callable(name) else mark


@overload
def api(name: F, /) -> F: ...
@overload
def api(name: str | None = None) -> Callable[[F], F]: ...
def api(name: Any = None) -> Any:
    """Serve this method to users: ``POST /{name}`` on the public port. Text items are streamed as text."""
    if callable(name):
        return endpoint(transports=[DynamoTransport.HTTP])(name)
    return endpoint(name, transports=[DynamoTransport.HTTP])


@overload
def abstract_endpoint(name: F, /) -> F: ...
@overload
def abstract_endpoint(
    name: str | None = None, transports: Sequence[DynamoTransport] | None = None
) -> Callable[[F], F]: ...
def abstract_endpoint(name: Any = None, transports: Sequence[DynamoTransport] | None = None) -> Any:
    """Declare an endpoint that a subclass of this AbstractService must implement and mark ``@endpoint``."""

    def mark(function: F) -> F:
        setattr(function, ABSTRACT_MARK, True)
        return function

    return mark(name) if callable(name) else mark


def async_on_start(function: F) -> F:
    """Run this method, sync or async, after ``__init__`` and before the endpoints are served."""
    return _hook(function, Hook.START)


def on_shutdown(function: F) -> F:
    """Run this method, sync or async, when the process has drained and is about to end."""
    return _hook(function, Hook.SHUTDOWN)


def liveness(function: F) -> F:
    """Ask this method whether the service lives: True becomes status 200, False 503, an exception 500."""
    return _hook(function, Hook.LIVENESS)


def readiness(function: F) -> F:
    """Ask this method whether the service may get requests; its answers count as for ``@liveness``."""
    return _hook(function, Hook.READINESS)


def _hook(function: F, hook: Hook) -> F:
    if not callable(function):
        raise InterfaceError(f"@{hook} expects a method, got {function!r}", hint="Write it without brackets.")
    setattr(function, HOOK_MARK, hook)
    return function


def endpoints_of(inner: type) -> dict[str, Endpoint]:
    """Return the endpoints of a class by name, base classes first, each class in order of definition."""
    found: dict[str, Endpoint] = {}
    for method_name in _method_names(inner):
        function = getattr(inner, method_name, None)
        mark = getattr(function, ENDPOINT_MARK, None)
        if isinstance(mark, EndpointMark) and callable(function):
            name = mark.name or method_name
            found[name] = Endpoint(name, method_name, mark.transports, function)
    return found


def hooks_of(inner: type, hook: Hook) -> tuple[str, ...]:
    """Return the names of the methods with that mark, base classes first, each class in order of definition.

    A method that overrides a marked one counts as marked: a subclass need not repeat the decorator.
    """
    marked = (
        name
        for name in _method_names(inner)
        if any(getattr(vars(each).get(name), HOOK_MARK, None) == hook for each in inner.__mro__)
    )
    return tuple(marked)


def _method_names(inner: type) -> list[str]:
    return list(dict.fromkeys(name for each in reversed(inner.__mro__) for name in vars(each)))
