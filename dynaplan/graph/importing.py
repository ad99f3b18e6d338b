"""Find and import the module that a graph identifier names."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from dynaplan.graph.compat import enable_compat
from dynaplan.graph.errors import nearest
from dynaplan.util.errors import GraphError, UserError


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
    with _readable_errors(module_name, working_dir):
        if file is None:
            _uncover(module_name, working_dir)
        if file is None or _is_found_as(module_name, file):
            return importlib.import_module(module_name)
        return _load_file(module_name, file)


def shipped_graphs() -> list[Path]:
    """Return the folders of the package ``graphs``, in which the shipped graphs are."""
    graphs = importlib.util.find_spec("graphs")
    return [Path(folder) for folder in (graphs.submodule_search_locations if graphs else None) or ()]


def _file_of(name: str, working_dir: Path) -> Path | None:
    """Return the graph's file in the working directory; None to leave the name to Python's own search."""
    path = (working_dir / name).resolve()
    if path.is_dir() and ("/" in name or not name.isidentifier()):
        raise GraphError(f"{name} is a directory", hint="Name the module in it: <module>:<attribute>.")
    if path.is_file():
        if path.suffix != ".py":
            raise GraphError(f"{name} is not a Python file", hint="Name a .py file or a module.")
        if not path.is_relative_to(working_dir):
            raise GraphError(
                f"{name} does not lie under the working directory {working_dir}", hint="Set --working-dir."
            )
        return path
    if name.endswith(".py") or "/" in name:
        raise GraphError(f"{name}: no such file in {working_dir}", hint=_near_modules(name, working_dir))
    path = working_dir.joinpath(*name.split("."))
    candidates = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next((each for each in candidates if each.is_file()), None)


def _uncover(module_name: str, working_dir: Path) -> None:
    """Let a package of the working directory have the modules of an installed one of the same name too.

    Otherwise a folder ``graphs`` of the user's own would hide the shipped graphs.
    """
    name, _, rest = module_name.partition(".")
    if rest and (working_dir / name / "__init__.py").is_file():
        package = importlib.import_module(name)
        # In place: the package's specification, which tells Python's searches, holds the same list.
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
def _readable_errors(module_name: str, working_dir: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            hint = f"{_near_modules(module_name, working_dir)} (looked in {working_dir} and sys.path)"
            raise GraphError(f"No module named {module_name!r}", hint=hint) from error
        raise _failed(module_name, error) from error
    except Exception as error:
        raise _failed(module_name, error) from error


def _failed(module_name: str, error: Exception) -> GraphError:
    """Make the error, with the file and line at which the author's own code last ran."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and frame.filename not in (__file__, importlib.__file__)
    ]
    where = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    return GraphError(f"cannot import {module_name!r}: {type(error).__name__}: {error}", hint=where)


def _near_modules(name: str, working_dir: Path) -> str:
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
