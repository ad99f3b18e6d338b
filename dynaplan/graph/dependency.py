"""``depends()``: the possible edges of a graph, written as class attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, overload

from dynaplan.graph.endpoints import ABSTRACT_MARK, ENDPOINT_MARK
from dynaplan.graph.errors import InterfaceError, UnboundDependency

if TYPE_CHECKING:
    from dynaplan.graph.service import Service


class AbstractService:
    """Base of an interface: a dependency that does not name the service which implements it.

    A service that subclasses it must implement every ``@abstract_endpoint``; ``link()`` replaces the
    interface with the implementing service.
    """


class Dependency:
    """One possible edge of a graph; read from an instance, the attribute is the bound client instead."""

    def __init__(self, on: Service[Any] | type[AbstractService]) -> None:
        self.on = on
        self.attribute = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.attribute = name

    @property
    def target_class(self) -> type:
        """The class that a linked service must be a subclass of."""
        return self.on if isinstance(self.on, type) else self.on.inner

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Any: ...
    def __get__(self, instance: object | None, owner: type) -> Any:
        """Return this object on a class; raise UnboundDependency on an instance.

        A bound client lies in the instance's own ``__dict__``, which Python looks into before it comes here.
        """
        if instance is None:
            return self
        name = self.target_class.__name__
        raise UnboundDependency(
            f"{owner.__name__}.{self.attribute}: no client is bound, {name} is not linked in this graph",
            hint=f"Link it in the graph module: {owner.__name__}.link({name}).",
        )

    def __repr__(self) -> str:
        return f"depends({self.target_class.__name__})"


def depends(on: Service[Any] | type) -> Dependency:
    """Declare a dependency on a service or an interface; an instance has a client of its endpoints there.

    ``async for item in self.<attribute>.<endpoint>(request)`` calls it.
    """
    from dynaplan.graph.service import Service

    if isinstance(on, Service) or (isinstance(on, type) and issubclass(on, AbstractService)):
        return Dependency(on)
    raise InterfaceError(
        "depends() expects 'on' to be a ServiceInterface, an AbstractService type",
        hint=f"Got {on!r}; decorate its class with @service.",
    )


def dependencies_of(inner: type) -> dict[str, Dependency]:
    """Return the dependencies of a class, inherited ones too, in the order of their attribute names."""
    found = {name: getattr(inner, name, None) for each in inner.__mro__ for name in vars(each)}
    return {name: found[name] for name in sorted(found) if isinstance(found[name], Dependency)}  # type: ignore[misc]


def check_interface(inner: type) -> None:
    """Raise InterfaceError when the class does not implement an ``@abstract_endpoint`` of its interfaces."""
    names = [
        name
        for each in reversed(inner.__mro__)
        for name, value in vars(each).items()
        if getattr(value, ABSTRACT_MARK, False)
    ]
    missing, unmarked, uncallable = [], [], []
    for name in dict.fromkeys(names):
        value = getattr(inner, name)
        if not callable(value):
            uncallable.append(f"{name} must be callable, got {type(value).__name__}")
        elif getattr(value, ABSTRACT_MARK, False):
            missing.append(name)
        elif not hasattr(value, ENDPOINT_MARK):
            unmarked.append(name)
    parts = [f"missing implementation(s): {', '.join(missing)}"] if missing else []
    parts += [f"method(s) not decorated with @endpoint: {', '.join(unmarked)}"] if unmarked else []
    parts += uncallable
    if parts:
        raise InterfaceError(f"{inner.__name__} violates Dynamo interface — {'; '.join(parts)}")
