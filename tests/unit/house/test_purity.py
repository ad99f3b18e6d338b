"""The core does nothing but decide."""

from __future__ import annotations

import ast

from tests.unit.house.source import MODULES, short, tree


def test_the_core_does_no_io_by_other_means_than_the_import_contract_sees() -> None:
    pure = [module for module in MODULES if {"core", "domain"} & set(short(module).split("/"))]
    found = {short(module): names_used(tree(module)) & IMPURE for module in pure}
    assert {name: names for name, names in found.items() if names} == {}


IMPURE = frozenset(
    {"print", "open", "input", "exec", "eval", "__import__", "breakpoint"}
    | {"pathlib", "io", "sys", "tempfile", "shutil", "secrets", "uuid", "datetime", "urllib", "http"}
)
"""Builtins and modules of the standard library that ``setup.cfg`` does not name."""


def names_used(module: ast.Module) -> set[str]:
    """The builtins that are called and the modules that are imported."""
    found = set()
    for node in ast.walk(module):
        match node:
            case ast.Call(func=ast.Name(id=name)):
                found.add(name)
            case ast.Import(names=names):
                found |= {each.name.partition(".")[0] for each in names}
            case ast.ImportFrom(module=str(name)):
                found.add(name.partition(".")[0])
    return found
