"""One concept, one name, one home."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.unit.house.source import MODULES, on_several, short, tree


def test_a_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module in MODULES:
        if short(module).startswith("graphs/"):
            continue  # examples: their services are not the package's
        for node in tree(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(short(module))
    assert on_several(places) == {}
