"""Load a graph: from ``module:Class`` to the services that run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from dynaplan.graph import links
from dynaplan.graph.errors import nearest
from dynaplan.graph.importing import import_graph_module
from dynaplan.graph.service import Service
from dynaplan.util.errors import GraphError

IDENTIFIER = re.compile(r"(?P<module>[^:]+)(:(?P<attributes>[^\W\d]\w*(\.[^\W\d]\w*)*))?")


@dataclass(frozen=True)
class Graph:
    """The services reachable from the entry over linked dependencies, each with its linked dependencies only.

    ``identifier`` is what the user wrote; with ``working_dir``, absolute, another process loads the same
    graph. ``module_file`` is the graph module's file: configurations are looked up beside it.
    """

    identifier: str
    working_dir: Path
    entry: Service[Any]
    module_file: Path | None = None

    def services(self) -> list[Service[Any]]:
        """Return every service once: the entry first, then depth first by the attributes' names."""
        found: dict[int, Service[Any]] = {}
        waiting = [self.entry]
        while waiting:
            service = waiting.pop()
            if id(service) not in found:
                found[id(service)] = service
                waiting += [service.dependencies[name] for name in sorted(service.dependencies, reverse=True)]
        return list(found.values())

    def service(self, name: str) -> Service[Any]:
        """Return the service of that name; raise GraphError, with the nearest name, when there is none."""
        services = {service.name: service for service in self.services()}
        if name not in services:
            raise GraphError(f"{self.identifier} has no service {name!r}", hint=nearest(name, services))
        return services[name]


def load_graph(identifier: str, working_dir: Path) -> Graph:
    """Import the graph's module and follow its edges.

    ``identifier`` is ``module:Class``, ``module:Class.dependency.dependency`` or ``path.py:Class``;
    ``module`` alone stands for its one service on which no other depends. ``Service.link`` tells which
    edges count. A service that occurs in no counted edge keeps all its dependencies; any other keeps its
    linked ones only. Raises GraphError.
    """
    match = IDENTIFIER.fullmatch(identifier.strip())
    if match is None:
        raise GraphError(
            f'Invalid import string "{identifier}", must be in format "<module>:<attribute>" or "<module>"',
            hint="For example graphs.disagg:Frontend.",
        )
    module = import_graph_module(match["module"], working_dir)
    attributes = match["attributes"].split(".") if match["attributes"] else []
    declared = _attribute(module, attributes[0]) if attributes else _root(module)
    for attribute in attributes[1:]:
        declared = _dependency(module, declared, attribute)
    entry = _linked(declared, _stated(module))
    file = Path(module.__file__).resolve() if module.__file__ else None
    graph = Graph(identifier, working_dir.resolve(), entry, file)
    _check_names(graph)
    return graph


def _attribute(module: ModuleType, name: str) -> Service[Any]:
    found = getattr(module, name, None)
    if isinstance(found, Service):
        return found
    names = [key for key, value in vars(module).items() if isinstance(value, Service)]
    if found is None:
        message = f'Attribute "{name}" not found in module "{module.__name__}".'
    else:
        message = f'"{name}" in module "{module.__name__}" is not a service but {type(found).__name__}.'
    raise GraphError(message, hint=nearest(name, names))


def _dependency(module: ModuleType, service: Service[Any], attribute: str) -> Service[Any]:
    if attribute not in service.declared:
        raise GraphError(
            f'Attribute "{attribute}" is not a dependency of {service.name}.',
            hint=nearest(attribute, service.declared),
        )
    target = _stated(module).get((service, attribute)) or service.dependencies.get(attribute)
    return target or _not_servable(service, attribute)


def _root(module: ModuleType) -> Service[Any]:
    """Return the one service among the module's globals on which no other service there depends."""
    services = list({id(each): each for each in vars(module).values() if isinstance(each, Service)}.values())
    if not services:
        raise GraphError(f"No DynamoService instances found in module {module.__name__!r}")
    stated = _stated(module)
    targets = {id(target) for each in services for target in each.dependencies.values()}
    targets |= {id(target) for target in stated.values()}
    roots = sorted((each for each in services if id(each) not in targets), key=lambda each: each.name)
    if not roots:
        raise GraphError(f"No root DynamoService found in module {module.__name__!r}")
    if len(roots) > 1:
        names = [each.name for each in roots]
        raise GraphError(
            f"Multiple root services found in module {module.__name__!r}: {names}",
            hint=f"Name one of them: {module.__name__}:{names[0]}.",
        )
    return roots[0]


def _stated(module: ModuleType) -> links.Edges:
    """Return the edges that count for a graph of this module, by the rules of ``Service.link``."""
    own = links.stated_in(module.__name__)
    named = [each for each in vars(module).values() if isinstance(each, Service)]
    known: dict[int, Service[Any]] = {}
    waiting = [*named, *(source for source, _ in own), *own.values()]
    edges = dict(own)
    while waiting:
        service = waiting.pop()
        if id(service) in known:
            continue
        known[id(service)] = service
        home = links.stated_in(service.inner.__module__)
        at_home = {edge: target for edge, target in home.items() if edge[0] is service}
        edges = at_home | edges
        waiting += [*service.dependencies.values(), *at_home.values()]
    return edges


def _linked(entry: Service[Any], edges: links.Edges) -> Service[Any]:
    """Copy the services that are reached from the entry, each with its linked dependencies."""
    in_edges = {id(source) for source, _ in edges} | {id(target) for target in edges.values()}
    copies = {id(entry): entry.copy()}
    waiting = [entry]
    while waiting:
        service = waiting.pop()
        chosen = {name: target for (source, name), target in edges.items() if source is service}
        if id(service) not in in_edges:
            chosen = {
                name: service.dependencies.get(name) or _not_servable(service, name)
                for name in service.declared
            }
        for name in sorted(chosen):
            target = chosen[name]
            if id(target) not in copies:
                copies[id(target)] = target.copy()
                waiting.append(target)
            copies[id(service)].dependencies[name] = copies[id(target)]
    return copies[id(entry)]


def _not_servable(service: Service[Any], attribute: str) -> NoReturn:
    name = service.declared[attribute].target_class.__name__
    raise GraphError(
        f"Service {name} is not servable. Please use link to override with a concrete implementation.",
        hint=f"State the graph's links; {service.name}.{attribute} takes any service that subclasses {name}.",
    )


def _check_names(graph: Graph) -> None:
    names = [service.name for service in graph.services()]
    twice = _first_twice(names)
    if twice:
        raise GraphError(f"{graph.identifier} has two services named {twice}", hint="Rename one class.")


def _first_twice(names: Iterable[str]) -> str:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return ""
