"""Functions and ports are small enough to be read at once."""

from __future__ import annotations

import ast

from tests.unit.house.source import MODULES, Function, functions, more_than, short, tree

MOST_LINES_OF_A_FUNCTION = 50
MOST_METHODS_OF_A_PORT = 6


def test_a_function_is_small() -> None:
    sizes = {f"{short(module)}:{node.name}": length(node) for module in MODULES for node in functions(module)}
    assert more_than(MOST_LINES_OF_A_FUNCTION, sizes) == {}


def length(function: Function) -> int:
    """Its lines, decorators apart; those of a command, whose parameters are its options, from its body on."""
    is_command = any("click" in ast.unparse(each) for each in function.decorator_list)
    first = function.body[0].lineno if is_command else function.lineno
    return (function.end_lineno or 0) - first + 1


def test_a_port_has_at_most_six_methods() -> None:
    modules = (tree(module) for module in MODULES if module.stem.endswith(("port", "ports")))
    classes = [node for module in modules for node in module.body if isinstance(node, ast.ClassDef)]
    ports = [node for node in classes if "Protocol" in map(ast.unparse, node.bases)]
    sizes = {node.name: sum(isinstance(each, Function) for each in node.body) for node in ports}
    assert sizes
    assert more_than(MOST_METHODS_OF_A_PORT, sizes) == {}
