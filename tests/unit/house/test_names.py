"""One concept, one name, one home."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.unit.house.source import MODULES, on_several, short, tree

NAMES_TO_PART = frozenset(
    {
        "Prompts",
        "Planner",
        "Endpoint",
        "Frontend",
    }
)
"""Names of classes that stand for two things still."""


def test_a_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module in MODULES:
        for node in tree(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(short(module))
    twice = {name: found for name, found in on_several(places).items() if name not in NAMES_TO_PART}
    assert twice == {}
