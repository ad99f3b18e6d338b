"""``@service``, which makes a class a node of a graph, and ``link()``, which chooses the graph's edges."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from dynaplan.graph import links
from dynaplan.graph.dependency import Dependency, check_interface, dependencies_of
from dynaplan.graph.endpoints import Endpoint, Hook, endpoints_of, hooks_of
from dynaplan.graph.errors import InterfaceError, LinkError, nearest
from dynaplan.graph.lifecycle import Role

if TYPE_CHECKING:
    from dynaplan.config.settings.fields import Options

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
    linked ones only. A class statement may name a service as a base: it then subclasses ``inner``.
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
        self._options = options
        self.role = _role(inner.__name__, config.component_type)
        self.declared = dependencies_of(inner)
        self.dependencies: dict[str, Service[Any]] = {
            attribute: dependency.on
            for attribute, dependency in self.declared.items()
            if isinstance(dependency.on, Service)
        }

    @property
    def name(self) -> str:
        """The class's name; also the service's section in a configuration."""
        return self.inner.__name__

    @property
    def options(self) -> Options | None:
        """The known options by key; None when the service takes any key."""
        return self._options() if callable(self._options) else self._options

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """The endpoints of the class, by name."""
        return endpoints_of(self.inner)

    @property
    def start_hooks(self) -> tuple[str, ...]:
        """The ``@async_on_start`` methods, in the order to run them."""
        return hooks_of(self.inner, Hook.START)

    @property
    def shutdown_hooks(self) -> tuple[str, ...]:
        """The ``@on_shutdown`` methods, in the order to run them."""
        return hooks_of(self.inner, Hook.SHUTDOWN)

    @property
    def liveness_hooks(self) -> tuple[str, ...]:
        """The names of the methods marked ``@liveness``, in the order of the class."""
        return hooks_of(self.inner, Hook.LIVENESS)

    @property
    def readiness_hooks(self) -> tuple[str, ...]:
        """The names of the methods marked ``@readiness``, in the order of the class."""
        return hooks_of(self.inner, Hook.READINESS)

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
                hint=f"{self.name} depends on: {_listed(self.declared)}.",
            )
        if len(fitting) > 1:
            raise LinkError(
                f"{target.name} fulfills multiple dependencies required by {self.name}: {fitting}"
            )
        links.record(sys._getframe(1).f_globals, self, fitting[0], target)
        return target

    def bind(self, instance: T, attribute: str, client: Any) -> None:
        """Set ``instance.<attribute>`` to that client; in a unit test, to the other service's instance."""
        if attribute not in self.declared:
            hint = nearest(attribute, self.declared)
            raise LinkError(f"{self.name} has no dependency {attribute!r}", hint=hint)
        vars(instance)[attribute] = client

    def copy(self) -> Service[T]:
        """Return the same service without dependencies, which a graph then fills in."""
        other = copy(self)
        other.dependencies = {}
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


def _listed(declared: Mapping[str, Dependency]) -> str:
    return ", ".join(each.target_class.__name__ for each in declared.values()) or "nothing"
