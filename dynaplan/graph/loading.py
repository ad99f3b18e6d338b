"""Load a graph: import the module that its identifier names, and follow its edges to the services."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NoReturn

from dynaplan.config.other_files import recognise_name
from dynaplan.config.settings.servers import COMPAT_VARIABLE
from dynaplan.graph.lifecycle import Role
from dynaplan.graph.service import Edges, Service, stated_links
from dynaplan.util.errors import ConfigError, GraphError, UserError, nearest

APIS = ("dynamo",)

COMPAT_DIR = Path(__file__).resolve().parents[1] / "data" / "compat"
"""The folder that holds the modules, each API's in the package of its name."""


def enable_compat(environ: Mapping[str, str]) -> None:
    """Make the modules of the API that ``--compat`` has named importable, before an installed package's.

    Nothing happens where the environment names none; raises ConfigError for an unknown one.
    """
    name = environ.get(COMPAT_VARIABLE, "")
    if name and name not in APIS:
        raise ConfigError(f"--compat {name}: there is no such API", hint=nearest(name, APIS))
    if name and str(COMPAT_DIR) not in sys.path:
        sys.path.insert(0, str(COMPAT_DIR))


def compat_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a separate Python program that imports Dynamo's modules from dynaplan."""
    path = os.pathsep.join(filter(None, [str(COMPAT_DIR), environ.get("PYTHONPATH", "")]))
    return {**environ, COMPAT_VARIABLE: APIS[0], "PYTHONPATH": path}


def import_graph_module(name: str, working_dir: Path) -> ModuleType:
    """Import ``package.module`` or ``path/to/module.py``, the working directory first on the search path.

    A file in the working directory wins over an installed module of the same name, whether or not its
    directories have an ``__init__.py``. The working directory stays on the search path, since services may
    import lazily. Raises GraphError, with the cause and its file and line, when the import fails.
    """
    enable_compat(os.environ)
    working_dir = working_dir.resolve()
    file = _file_of(name, working_dir)
    module_name = name if file is None else ".".join(file.relative_to(working_dir).with_suffix("").parts)
    if module_name.endswith(".__init__"):
        module_name = module_name.removesuffix(".__init__")
    if str(working_dir) not in sys.path[:1]:
        sys.path.insert(0, str(working_dir))
    with _graph_errors(module_name, working_dir):
        if file is None:
            _extend_package_path(module_name, working_dir)
        if file is None or _is_found_as(module_name, file):
            return importlib.import_module(module_name)
        return _load_file(module_name, file)


def shipped_graphs() -> list[Path]:
    """Return the folders of the package ``graphs`` as installed, usually one; none where it is missing."""
    graphs = importlib.util.find_spec("graphs")
    return [Path(folder) for folder in (graphs.submodule_search_locations if graphs else None) or ()]


def _file_of(name: str, working_dir: Path) -> Path | None:
    """Return the graph's file in the working directory; None to leave the name to Python's own search."""
    path = (working_dir / name).resolve()
    if path.is_dir() and ("/" in name or not name.isidentifier()):
        raise GraphError(f"{name} is a directory", hint="Name the module in it: <module>:<attribute>.")
    if path.is_file():
        if path.suffix != ".py":
            what, hint = recognise_name(name) or ("not a Python file", "Name a .py file or a module.")
            raise GraphError(f"{name} is {what}", hint=hint)
        if not path.is_relative_to(working_dir):
            raise GraphError(
                f"{name} does not lie under the working directory {working_dir}", hint="Set --working-dir."
            )
        return path
    if name.endswith(".py") or "/" in name:
        raise GraphError(f"{name}: no such file in {working_dir}", hint=_nearest_modules(name, working_dir))
    path = working_dir.joinpath(*name.split("."))
    candidates = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next((each for each in candidates if each.is_file()), None)


def _extend_package_path(module_name: str, working_dir: Path) -> None:
    """Let a package of the working directory have the modules of an installed one of the same name too.

    Otherwise a folder ``graphs`` of the user's own would hide the shipped graphs.
    """
    name, _, rest = module_name.partition(".")
    if rest and (working_dir / name / "__init__.py").is_file():
        package = importlib.import_module(name)
        # In place: the package's specification, which Python searches by, holds the same list.
        package.__path__[:] = pkgutil.extend_path(package.__path__, name)


def _is_found_as(module_name: str, file: Path) -> bool:
    """Tell whether Python's own search for the name ends at that file."""
    importlib.invalidate_caches()
    loaded = sys.modules.get(module_name)
    if loaded is not None and _origin(loaded) != file:
        return False
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == file


def _origin(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None


def _load_file(module_name: str, file: Path) -> ModuleType:
    """Import the file, once, under a name made from its path: the plain name belongs to another module."""
    own_name = re.sub(r"\W", "_", f"{module_name} at {file.parent}")
    loaded = sys.modules.get(own_name)
    if loaded is not None and _origin(loaded) == file:
        return loaded
    spec = importlib.util.spec_from_file_location(own_name, file)
    if spec is None or spec.loader is None:
        raise GraphError(f"{file} cannot be imported")
    module = sys.modules[own_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[own_name]
        raise
    return module


@contextlib.contextmanager
def _graph_errors(module_name: str, working_dir: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            hint = f"{_nearest_modules(module_name, working_dir)} (looked in {working_dir} and sys.path)"
            raise GraphError(f"No module named {module_name!r}", hint=hint) from error
        raise _import_error(module_name, error) from error
    except (Exception, SystemExit) as error:  # as of a script that reads its arguments when it is imported
        raise _import_error(module_name, error) from error


def _import_error(module_name: str, error: BaseException) -> GraphError:
    """Make the error, with the file and line at which the author's own code last ran."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and frame.filename not in (__file__, importlib.__file__)
    ]
    where = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    if missing and not missing.startswith(("dynamo", "dynaplan")):
        package = missing.partition(".")[0]
        where += (
            f"\n  {package} is not installed here: `pip install {package}`; a module of your own is looked "
            "for in --working-dir."
        )
    return GraphError(f"cannot import {module_name!r}: {type(error).__name__}: {error}", hint=where)


def _nearest_modules(name: str, working_dir: Path) -> str:
    """Return a hint with the module nearest to a mistyped one."""
    wanted = name.removesuffix(".py").replace("/", ".").strip(".")
    files = [*working_dir.glob("*.py"), *working_dir.glob("*/*.py")]
    modules = [".".join(file.relative_to(working_dir).with_suffix("").parts) for file in files]
    from difflib import get_close_matches

    for folder in shipped_graphs():
        modules += [f"graphs.{file.stem}" for file in folder.glob("*.py")]
    if get_close_matches(wanted, modules, 1):
        return nearest(wanted, modules)
    return "Check the name and --working-dir."


NO_MODELS: Mapping[str, str] = MappingProxyType({})

_OF_A_MODEL = (Role.DECODE, Role.PREFILL)
"""The roles of services that serve one model."""

IDENTIFIER = re.compile(r"(?P<module>[^:]+)(:(?P<attributes>[^\W\d]\w*(\.[^\W\d]\w*)*))?")


@dataclass(frozen=True)
class Graph:
    """The services reachable from the entry over linked dependencies, each with its linked dependencies only.

    ``identifier`` is what the user wrote; with ``working_dir``, absolute, another process loads the same
    graph. ``module_file`` is the graph module's file: configurations are looked up beside it. ``models`` are
    the services of several models, in place of the graph's own engine workers; empty where it has one model.
    """

    identifier: str
    working_dir: Path
    entry: Service[Any]
    module_file: Path | None = None
    models: tuple[Service[Any], ...] = ()

    def services(self) -> list[Service[Any]]:
        """Return every service once: the entry first, then depth first by the attributes' names.

        The services of several models come last.
        """
        linked = self._linked()
        return (
            [each for each in linked if each.role not in _OF_A_MODEL] + [*self.models]
            if self.models
            else linked
        )

    def with_models(
        self, models: Mapping[str, str], planned: Collection[str] = (), prefill: Mapping[str, str] = NO_MODELS
    ) -> Graph:
        """Return the graph in which each of these models, name -> component, has its own engine workers.

        Those in ``prefill``, name -> component, have prefill workers, too. Its planner plans for each of the
        ``planned`` ones. Raises GraphError for a graph without such workers, for one without a planner where
        any is planned, and for one with a planner where none is.
        """
        if not models:
            return self
        linked = self._linked()
        services = self._of_models(Role.DECODE, models) + self._of_models(Role.PREFILL, prefill)
        planner = next((each.name for each in linked if each.role is Role.PLANNER), "")
        if planner and not planned:
            raise GraphError(
                f"{self.identifier} has a {planner}, and none of the {len(models)} models has a planner",
                hint="Leave the graph out: `dynaplan serve FILE` takes a file with a section Models. Or give "
                "a model a planner of its own: Models.NAME.Planner.",
            )
        if planned and not planner:
            raise GraphError(
                f"{self.identifier} has no planner, and {', '.join(sorted(planned))} is to be planned for",
                hint="Leave the graph out, or link a Planner.",
            )
        return replace(self, models=services)

    def _of_models(self, role: Role, components: Mapping[str, str]) -> tuple[Service[Any], ...]:
        """Return a copy of the graph's service of that role for each model; ``components`` names them.

        Raises GraphError where the graph has no such service.
        """
        template = next((each for each in self._linked() if each.role is role), None)
        if template is None and components:
            raise GraphError(
                f"{self.identifier} has no {role.value} workers that could serve models",
                hint="Leave the graph out: `dynaplan serve FILE` takes a file with a section Models.",
            )
        return tuple(template.of_model(name, each) for name, each in components.items()) if template else ()

    def _linked(self) -> list[Service[Any]]:
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
    ``module`` alone stands for its one service on which no other depends. ``Service.link`` says which
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
    entry = _copy_linked(declared, _counted_edges(module))
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
    target = _counted_edges(module).get((service, attribute)) or service.dependencies.get(attribute)
    return target or _not_servable(service, attribute)


def _root(module: ModuleType) -> Service[Any]:
    """Return the one service among the module's globals on which no other service there depends."""
    services = list({id(each): each for each in vars(module).values() if isinstance(each, Service)}.values())
    if not services:
        raise GraphError(f"No DynamoService instances found in module {module.__name__!r}")
    stated = _counted_edges(module)
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


def _counted_edges(module: ModuleType) -> Edges:
    """Return the edges that count for a graph of this module, by the rules of ``Service.link``."""
    own = stated_links(module.__name__)
    named = [each for each in vars(module).values() if isinstance(each, Service)]
    known: dict[int, Service[Any]] = {}
    waiting = [*named, *(source for source, _ in own), *own.values()]
    edges = dict(own)
    while waiting:
        service = waiting.pop()
        if id(service) in known:
            continue
        known[id(service)] = service
        home = stated_links(service.inner.__module__)
        at_home = {edge: target for edge, target in home.items() if edge[0] is service}
        edges = at_home | edges
        waiting += [*service.dependencies.values(), *at_home.values()]
    return edges


def _copy_linked(entry: Service[Any], edges: Edges) -> Service[Any]:
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
    twice = next((name for index, name in enumerate(names) if name in names[:index]), "")
    if twice:
        raise GraphError(f"{graph.identifier} has two services named {twice}", hint="Rename one class.")
