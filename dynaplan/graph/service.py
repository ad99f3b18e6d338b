"""The vocabulary of a graph: ``@service`` makes a class a node, ``depends()`` and ``link()`` make the edges.

``depends()`` declares the possible edges, as class attributes; ``A.link(B)`` chooses one. There is no list of
edges for the whole process: two graph modules that link the same services, each in its own way, must not see
each other's edges. So an edge belongs to the module whose code calls ``link()``, and is kept in that module's
own globals. It vanishes with the module; a reloaded module, or another module of the same name, begins with
none. docs/decisions/0009 gives the reasons.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

from dynaplan.graph.endpoints import (
    ABSTRACT_MARK,
    ENDPOINT_MARK,
    Endpoint,
    InterfaceError,
    LinkError,
    UnboundDependency,
    endpoints_of,
)
from dynaplan.graph.lifecycle import Role
from dynaplan.util.errors import nearest

if TYPE_CHECKING:
    from dynaplan.config.settings.fields import Options


dynamo_context: dict[str, Any] = {}
"""Filled before a service is made: ``service_name``, ``namespace``, ``worker_id`` (text), ``runtime``,
``runner_map``, ``component``, ``endpoints``. Empty in a unit test."""


GLOBAL_NAME = "__dynaplan_links__"

Edges = dict[tuple["Service[Any]", str], "Service[Any]"]
"""(source, attribute of the dependency) -> target."""


@dataclass
class _Links:
    """The edges that one import of a module has stated; ``spec`` is that import's, as each makes its own."""

    spec: object
    edges: Edges = field(default_factory=dict)


def _record_link(
    module_globals: dict[str, Any], source: Service[Any], attribute: str, target: Service[Any]
) -> None:
    """Write an edge into the module with these globals, in place of an earlier one for the attribute."""
    spec = module_globals.get("__spec__")
    links = module_globals.get(GLOBAL_NAME)
    if not isinstance(links, _Links) or links.spec is not spec:
        links = module_globals[GLOBAL_NAME] = _Links(spec)
    links.edges[source, attribute] = target


def stated_links(module_name: str) -> Edges:
    links = getattr(sys.modules.get(module_name), GLOBAL_NAME, None)
    return dict(links.edges) if isinstance(links, _Links) else {}


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
    """Declare a dependency on a service or an interface, as an attribute of a service's class.

    On an instance the attribute is a client: ``async for item in self.<attribute>.<endpoint>(request)``.
    Raises InterfaceError for anything else than a service or an interface.
    """

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


T = TypeVar("T")


class ComponentType(StrEnum):
    """The values of ``dynamo={"component_type": ...}``; a service without one has the role ``service``."""

    FRONTEND = "frontend"
    DECODE = "decode"
    PREFILL = "prefill"
    PLANNER = "planner"


@dataclass(frozen=True)
class DecoratorConfig:
    """The arguments of ``@service``; the YAML and the command line override them.

    ``namespace`` is empty when the service leaves it to the graph. ``resources`` may hold ``gpu``,
    ``cpu`` and ``memory``, as numbers or text.
    """

    namespace: str = ""
    name: str = ""
    component_type: str = ""
    resources: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 1
    envs: Mapping[str, str] = field(default_factory=dict)


class Service(Generic[T]):
    """A class and its place in a graph. Made by ``@service``; ``inner`` is the class itself.

    ``dependencies`` are the services that ``depends()`` names; a service of a loaded Graph is a copy with the
    linked ones only. ``model`` is empty unless it serves one of several models. A class statement may name a
    service as a base: it then subclasses ``inner``.
    """

    def __init__(
        self,
        inner: type[T],
        config: DecoratorConfig,
        *,
        in_process_of: str = "",
        options: Options | Callable[[], Options] | None = None,
    ) -> None:
        check_interface(inner)
        self.inner = inner
        self.config = config
        self.in_process_of = in_process_of
        self.model = ""
        self._options = options
        self.name = inner.__name__
        """The class's name, or its model's component; also the service's section in a configuration."""
        self.role = _role(inner.__name__, config.component_type)
        self.declared = dependencies_of(inner)
        self.dependencies: dict[str, Service[Any]] = {
            attribute: dependency.on
            for attribute, dependency in self.declared.items()
            if isinstance(dependency.on, Service)
        }

    @property
    def options(self) -> Options | None:
        """The known options by key; None when the service takes any key."""
        return self._options() if callable(self._options) else self._options

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        return endpoints_of(self.inner)

    def link(self, target: Service[Any]) -> Service[Any]:
        """Choose the edge from this service to ``target``, and return ``target``, so that links chain.

        ``target``'s class must be, or be a subclass of, exactly one class that this service depends on.
        The edge belongs to the module whose code calls ``link()``. A graph takes the edges that its own
        module states, and the edges of a service that the module of its class states; it does not see the
        edges of other graph modules, even of imported ones. Linking twice is linking once, and a second
        target for the same dependency replaces the first.
        """
        if not isinstance(target, Service):
            raise LinkError(
                f"link must be passed a Service, got {type(target).__name__}",
                hint="Decorate it with @service.",
            )
        fitting = [
            name for name, each in self.declared.items() if issubclass(target.inner, each.target_class)
        ]
        if not fitting:
            raise LinkError(
                f"{target.name} does not fulfill any dependencies required by {self.name}",
                hint=f"{self.name} depends on: {_target_names(self.declared)}.",
            )
        if len(fitting) > 1:
            raise LinkError(
                f"{target.name} fulfills multiple dependencies required by {self.name}: {fitting}"
            )
        _record_link(sys._getframe(1).f_globals, self, fitting[0], target)
        return target

    def bind(self, instance: T, attribute: str, client: Any) -> None:
        """Set ``instance.<attribute>`` to that client; in a unit test, to the other service's instance.

        Raises LinkError when the service has declared no such dependency.
        """
        if attribute not in self.declared:
            hint = nearest(attribute, self.declared)
            raise LinkError(f"{self.name} has no dependency {attribute!r}", hint=hint)
        vars(instance)[attribute] = client

    def copy(self) -> Service[T]:
        """Return the same service without dependencies, which a graph then fills in."""
        other = copy(self)
        other.dependencies = {}
        return other

    def of_model(self, model: str, component: str) -> Service[T]:
        """Return the same service, under the name ``component``, as the one that serves this model alone."""
        other = self.copy()
        other.model, other.name = model, component
        return other

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return (self.inner,)

    def __repr__(self) -> str:
        return f"<Service {self.name}>"


@overload
def service(inner: type[T], /) -> Service[T]: ...
@overload
def service(
    *,
    dynamo: Mapping[str, Any] | None = None,
    resources: Mapping[str, Any] | None = None,
    workers: int = 1,
    envs: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
    in_process_of: str | None = None,
    options: Options | Callable[[], Options] | None = None,
    **ignored: Any,
) -> Callable[[type[T]], Service[T]]: ...
def service(inner: Any = None, /, **arguments: Any) -> Any:
    """Make a class a service of a graph.

    ``dynamo`` may hold ``namespace``, ``name`` and ``component_type``; ``resources`` may hold ``gpu``, the
    GPUs of one worker. ``in_process_of`` names the service whose process this one runs in. ``options``
    are the service's known options: with them, a configuration is checked. Other arguments are ignored.
    """
    if isinstance(inner, type):
        return Service(inner, DecoratorConfig())
    if inner is not None:
        raise InterfaceError(f"@service expects a class, got {inner!r}")
    config = _decorator_config(**arguments)

    def decorate(decorated: type[T]) -> Service[T]:
        return Service(
            decorated,
            config,
            in_process_of=arguments.get("in_process_of") or "",
            options=arguments.get("options"),
        )

    return decorate


def _decorator_config(
    dynamo: Mapping[str, Any] | None = None,
    resources: Mapping[str, Any] | None = None,
    workers: int = 1,
    envs: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
    **_ignored: Any,
) -> DecoratorConfig:
    about = dynamo or {}
    if not isinstance(envs, Mapping):
        envs = {each["name"]: each["value"] for each in envs or ()}
    return DecoratorConfig(
        namespace=about.get("namespace") or "",
        name=about.get("name") or "",
        component_type=str(about.get("component_type") or ""),
        resources=dict(resources or {}),
        workers=workers,
        envs=dict(envs),
    )


def _role(name: str, component_type: str) -> Role:
    try:
        return Role(component_type) if component_type else Role.SERVICE
    except ValueError:
        hint = nearest(component_type, ComponentType)
        raise InterfaceError(f"{name}: unknown component_type {component_type!r}", hint=hint) from None


def _target_names(declared: Mapping[str, Dependency]) -> str:
    return ", ".join(each.target_class.__name__ for each in declared.values()) or "nothing"


class PlannerInterface(AbstractService):
    """The Frontend's dependency for a linked planner. It has no endpoints: nothing calls a planner."""
