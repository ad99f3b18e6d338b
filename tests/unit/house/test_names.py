"""One concept, one name, one home."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.unit.house.source import MODULES, on_several, short, tree

NAMES_OF_TWO = {
    "Endpoint": "what a graph declares, and a path of the OpenAI API: both are the words of their users",
    "Frontend": "the service in a graph, and the HTTP server that it starts",
    "Prompts": "the costs of the expected prompts in sizing, and the maker of prompts in the profiler",
}
"""Names of two classes, and why they may stay: the two are never in sight of each other."""


def test_a_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module in MODULES:
        for node in tree(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(short(module))
    twice = {name: found for name, found in on_several(places).items() if name not in NAMES_OF_TWO}
    assert twice == {}
