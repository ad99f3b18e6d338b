"""Tests lie beside their modules, have names of their own, and poll instead of sleeping."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.unit.house.source import (
    PACKAGE,
    TEST_MODULES,
    TESTS,
    Function,
    functions,
    is_package,
    on_several,
    short,
    tree,
)
from tests.unit.house.tested_elsewhere import TESTED_ELSEWHERE

LONGEST_SLEEP_S = 0.3
HOME_OF_SLEEPS = TESTS / "fakes" / "polling.py"


def test_a_test_polls_with_a_deadline_instead_of_sleeping() -> None:
    found = [
        f"{short(module)}:{call.lineno}: {ast.unparse(call)}"
        for module in TEST_MODULES
        if module != HOME_OF_SLEEPS and not runs_in_virtual_time(module)
        for call in ast.walk(tree(module))
        if isinstance(call, ast.Call) and seconds_slept(call) > LONGEST_SLEEP_S
    ]
    assert found == []


def runs_in_virtual_time(module: Path) -> bool:
    return "pytest.mark.looptime" in module.read_text() or module.parent == TESTS / "unit" / "runtime"


def seconds_slept(call: ast.Call) -> float:
    """The number in ``time.sleep(number)`` and ``asyncio.sleep(number)``."""
    match call:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="time" | "asyncio"), attr="sleep"),
            args=[ast.Constant(value=int() | float() as seconds)],
        ):
            return seconds
    return 0.0


def test_a_unit_test_lies_at_the_path_of_its_module() -> None:
    files = [path for path in (TESTS / "unit").rglob("test_*.py") if path.parent.name != "house"]
    assert [short(file) for file in files if not module_of(file)] == []


def module_of(file: Path) -> Path | None:
    """The module that ``test_MODULE.py`` or ``test_MODULE_aspect.py`` tests."""
    folder = PACKAGE / file.parent.relative_to(TESTS / "unit")
    words = file.stem.removeprefix("test_").split("_")
    candidates = (folder / ("_".join(words[:count]) + ".py") for count in range(len(words), 0, -1))
    return next((module for module in candidates if module.is_file()), None)


def test_a_test_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module in TEST_MODULES:
        for function in functions(module):
            if function.name.startswith("test_"):
                places[function.name].append(short(module))
    assert on_several(places) == {}


CHECKS = ("raises", "warns", "fail", "eventually", "wait_until", "consistently", "run_state_machine_as_test")
"""Functions that fail a test as an assertion does."""


def test_a_test_asserts_something_or_says_that_it_does_not_raise() -> None:
    found = []
    for module in TEST_MODULES:
        helpers = {function.name: function for function in functions(module)}
        tests = (each for name, each in helpers.items() if name.startswith("test_"))
        found += [
            f"{short(module)}:{test.name}"
            for test in tests
            if "does_not_raise" not in test.name and not asserts(test, helpers)
        ]
    assert found == []


def asserts(function: Function, helpers: dict[str, Function]) -> bool:
    """Tell whether the function, or a helper of its module that it calls, asserts."""
    others = {name: helper for name, helper in helpers.items() if helper is not function}
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in CHECKS or "assert" in name or (name in others and asserts(others[name], others)):
                return True
    return False


def test_every_module_has_a_unit_test_or_is_imported_by_a_test_or_is_listed_with_its_suite() -> None:
    files = (file for file in PACKAGE.rglob("*.py") if not is_package(file))
    promises = PACKAGE / "ports"  # protocols, without code of their own
    modules = {file for file in files if any(functions(file)) and file.parent != promises}
    beside = {module_of(file) for file in (TESTS / "unit").rglob("test_*.py")}
    imported = {name for module in TEST_MODULES for name in imports_of(module)}
    listed = {PACKAGE / f"{name}.py" for names in TESTED_ELSEWHERE.values() for name in names}
    untested = {module for module in modules - beside if dotted(module) not in imported} - listed
    assert sorted(map(short, untested)) == []
    assert sorted(map(short, listed - modules)) == []
    assert [suite for suite in TESTED_ELSEWHERE if not (TESTS / suite).is_file()] == []


def dotted(module: Path) -> str:
    return ".".join(module.relative_to(PACKAGE.parent).with_suffix("").parts)


def imports_of(module: Path) -> Iterator[str]:
    """The names of the modules that a module imports, and of what it takes from them."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)
