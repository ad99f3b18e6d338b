"""Tests lie beside their modules, have names of their own, and poll instead of sleeping."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tests.unit.house.source import PACKAGE, TEST_MODULES, TESTS, functions, on_several, short, tree

LONGEST_SLEEP_S = 0.3
HOME_OF_SLEEPS = TESTS / "fakes" / "polling.py"

NAMES_TO_PART = frozenset(
    {
        "test_an_answer_is_the_same_text_streamed_or_not",
        "test_nobody_without_the_token_gets_work_done",
        "test_a_client_that_leaves_cancels_its_request",
        "test_round_robin_takes_turns",
        "test_an_unknown_fleet_changes_nothing",
        "test_a_token_for_the_hub_is_a_variable_and_no_flag",
        "test_one_resource_gives_the_gpus_and_the_flag",
        "test_a_part_of_a_gpu_gets_that_part_of_its_memory_unless_told_otherwise",
        "test_the_metrics_are_read",
        "test_the_directory_is_the_one_that_the_environment_names",
        "test_a_directory_that_cannot_be_made_is_told",
        "test_anything_else_is_refused",
    }
)
"""Names that two tests still have."""


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
            if function.name.startswith("test_") and function.name not in NAMES_TO_PART:
                places[function.name].append(short(module))
    assert on_several(places) == {}
