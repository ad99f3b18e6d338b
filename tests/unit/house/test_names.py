"""A file, a module or a name of ours that a page or a docstring has in backticks is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import dynaplan
from dynaplan.config.settings.fields import option
from dynaplan.config.settings.worker import ProcessSettings
from tests.guides.reading import fenced
from tests.unit.house.source import DOCUMENTS, MODULES, PACKAGE, REPOSITORY, TEST_MODULES, short, tree

PAGES = [each for each in DOCUMENTS if each.name != "CHANGELOG.md" and "decisions" not in each.parts]
"""What tells of today. The changelog and the decisions tell of what was there before, too."""

FILE = re.compile(r"[\w.-]+(/[\w.-]+)*\.(py|md|cfg|toml|ini)(::?\w+)?|[\w.-]+(/[\w.-]+)+/?")
DOTTED = re.compile(r"[a-z_]\w*(\.\w+)+")
FLATS = {each.name for each in PACKAGE.iterdir() if each.is_dir() and (each / "__init__.py").is_file()}

THEIRS = frozenset(
    {
        *("graphs/fast.yaml", "tests/fixtures/engines/fast/"),  # of the engine that the guide adds
        "planner/COMPONENT",
        *("mine.py", "traffic_metrics.py"),
        "planner.defaults",
        *("dynaplan.stores", "dynaplan.connectors"),
    }
)
"""What a reader writes, a key of the store, what is of Dynamo, and groups of entry points."""


def spans(text: str) -> Iterator[str]:
    """Yield what stands in single or double backticks on one line, outside of blocks."""
    text = re.sub(r"(?ms)^```.*?^```$|^    [^\n]*$", "", text)
    yield from (found[1] for found in re.finditer(r"(?<!`)`{1,2}([^`\s]+)`{1,2}(?!`)", text))


def docstrings(module: Path) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and its functions, and the texts below its constants."""
    for node in ast.walk(tree(module)):
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                yield text


NAMED = [
    *((page, each) for page in PAGES for each in spans(page.read_text())),
    *((module, each) for module in MODULES for text in docstrings(module) for each in spans(text)),
]


def is_file(text: str, named_in: Path) -> bool:
    path = re.split(r"::?", text)[0].rstrip("/")
    places = (REPOSITORY, PACKAGE, named_in.parent, *named_in.parents)
    written = (path, f"{path}.py")  # a module may be named without the end of its file's name
    return (
        any((place / each).exists() for place in places for each in written)
        or Path(path).name in names_of_files()
    )


@cache
def names_of_files() -> frozenset[str]:
    """The names of all files, for those that are named without their folders."""
    return frozenset(path.name for path in (*MODULES, *TEST_MODULES, *DOCUMENTS))


def is_name(text: str) -> bool:
    """Tell whether ``package.module.name``, perhaps without ``dynaplan``, is a module or a name in one."""
    if text.removeprefix("dynaplan.") in dynaplan._PUBLIC:
        return True
    parts = text.split(".")
    parts = parts[1:] if parts[0] == "dynaplan" else parts
    for place in range(len(parts), -1, -1):
        path = PACKAGE.joinpath(*parts[:place])
        module = path.with_suffix(".py") if place else PACKAGE / "__init__.py"
        module = module if module.is_file() else path / "__init__.py"
        if module.is_file():
            return not parts[place:] or parts[place] in names_in(module)
    return False


@cache
def names_in(module: Path) -> frozenset[str]:
    """The names that a module defines or imports, and those of its classes."""
    found: set[str] = set()
    for node in ast.walk(tree(module)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.alias(name=name):
                found.add(name)
    return frozenset(found)


def missing_files() -> list[str]:
    return [
        f"{short(where)}: {text}"
        for where, text in NAMED
        if FILE.fullmatch(text) and is_ours(text) and text not in THEIRS and not is_file(text, where)
    ]


def is_ours(text: str) -> bool:
    """Tell whether a path begins as one of this repository's does; a Python file alone may be anybody's."""
    first = text.partition("/")[0]
    roots = {"dynaplan", "tests", "docs", "graphs", "statefiles", *FLATS}
    return first in roots if "/" in text else text.endswith(".py")


def missing_names() -> list[str]:
    return [
        f"{short(where)}: {text}"
        for where, text in NAMED
        if DOTTED.fullmatch(text)
        and text.split(".")[0] in {"dynaplan", *FLATS}
        and text not in THEIRS
        and not text.endswith((".json", ".yaml"))
        and not FILE.fullmatch(text)
        and not is_name(text)
    ]


def test_every_file_of_ours_that_is_named_exists() -> None:
    assert missing_files() == []


def test_every_module_and_name_of_ours_that_is_named_exists() -> None:
    assert missing_names() == []


def imported(block: str) -> Iterator[str]:
    """Yield what a block of Python imports of dynaplan."""
    for node in ast.walk(ast.parse(block)):
        match node:
            case ast.ImportFrom(module=str() as module, names=names):
                yield from (f"{module}.{each.name}" for each in names)
            case ast.Import(names=names):
                yield from (each.name for each in names)


def test_what_a_block_of_python_imports_is_there() -> None:
    blocks = [(page, block) for page in PAGES for block in fenced(page, "python")]
    found = [(page, name) for page, block in blocks for name in imported(block)]
    ours = [(page, name) for page, name in found if name.startswith("dynaplan.")]
    assert len(ours) > 5
    assert [f"{short(page)}: {name}" for page, name in ours if not is_name(name)] == []


def test_the_option_that_contributing_declares_can_be_declared() -> None:
    (block,) = fenced(REPOSITORY / "CONTRIBUTING.md", "python")
    names = {"dataclass": dataclass, "option": option, "ProcessSettings": ProcessSettings}
    exec(compile(block, "CONTRIBUTING.md", "exec", flags=annotations.compiler_flag), names)
    assert names["WorkerSettings"].start_timeout_s == 1800.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "text", ["dynaplan.engines.common.server_engine", "engines.port.Engin", "dynaplan.nothing"]
)
def test_a_name_that_is_gone_would_be_found(text: str) -> None:
    assert not is_name(text)
    assert is_name("engines.port.Engine")
    assert is_name("dynaplan.util.errors.nearest")
