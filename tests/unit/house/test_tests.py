"""Tests assert something, poll instead of sleeping, and are all run."""

from __future__ import annotations

import ast
import configparser
from pathlib import Path

from tests.unit.house.source import REPOSITORY, TEST_MODULES, TESTS, Function, functions, short, tree

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


def test_the_modules_with_a_test_marked_alone_are_those_that_tox_names_for_it() -> None:
    """``tests`` and ``e2e`` leave these tests out: what ``alone`` does not name is never run."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(REPOSITORY / "tox.ini")
    named = {word for word in tox["testenv:alone"]["commands"].split() if word.endswith(".py")}
    assert named == {
        module.relative_to(REPOSITORY).as_posix()
        for module in TEST_MODULES
        if any(isinstance(node, ast.Attribute) and node.attr == "alone" for node in ast.walk(tree(module)))
    }
